"""Models by name: a built-in shape with random weights, a local folder, or an id of the hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memory_test.common.failures import UsageError

CLASSES = 3
_LLAMA = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "intermediate_size", "vocab_size")  # fmt: skip
_GPT2 = ("n_embd", "n_layer", "n_head")
_OWN = ("width", "depth", "heads")


@dataclass(frozen=True)
class Shape:
    """A built-in model: who builds it, and its sizes."""

    family: str
    sizes: dict[str, int]
    tied: bool = False  # whether the head's weight is the embedding's


def _shape(family: str, names: tuple[str, ...], *sizes: int, tied: bool = False) -> Shape:
    return Shape(family, dict(zip(names, sizes, strict=True)), tied)


SHAPES = {
    "tiny": _shape("own", (*_OWN, "vocab_size"), 32, 2, 2, 128),
    "small": _shape("own", (*_OWN, "vocab_size"), 256, 4, 4, 2048),
    "medium": _shape("own", (*_OWN, "vocab_size"), 1024, 12, 16, 32000),
    "tiny-llama": _shape("llama", _LLAMA, 64, 2, 4, 2, 128, 512),
    "tiny-tied": _shape("llama", _LLAMA, 64, 2, 4, 2, 128, 512, tied=True),
    # The layers of llama3-1b in negligible sizes: a step then shows the host's time.
    "thin-llama3-1b": _shape("llama", _LLAMA, 32, 16, 4, 2, 64, 64),
    "llama-160m": _shape("llama", _LLAMA, 768, 12, 12, 12, 2048, 32000),
    "smollm2-135m": _shape("llama", _LLAMA, 576, 30, 9, 3, 1536, 49152, tied=True),
    "llama3-1b": _shape("llama", _LLAMA, 2048, 16, 32, 8, 8192, 128256),
    "llama3-3b": _shape("llama", _LLAMA, 3072, 28, 24, 8, 8192, 128256),
    "llama3-8b": _shape("llama", _LLAMA, 4096, 32, 32, 8, 14336, 128256),
    "gpt2": _shape("gpt2", _GPT2, 768, 12, 12),
    "gpt2-large": _shape("gpt2", _GPT2, 1280, 36, 20),
    "tiny-dit": _shape("dit", _OWN, 32, 2, 2),
    "dit-xl-2": _shape("dit", _OWN, 1152, 28, 16),
}
# Ids of the hub whose shape is built in, for --random-weights.
SAME_SHAPE = {
    "meta-llama/Llama-3.2-1B": "llama3-1b",
    "meta-llama/Llama-3.2-3B": "llama3-3b",
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Llama-3.1-8B": "llama3-8b",
    "openai-community/gpt2": "gpt2",
    "openai-community/gpt2-large": "gpt2-large",
}


@dataclass(frozen=True)
class ModelRequest:
    """Which model to build.

    Attributes:
        name: Built-in shape, local folder or hub id.
        task: ``"lm"``, ``"classify"`` or, for diffusion models, ``"denoise"``.
        seq_length: Number of tokens of a sample.
        token: Token for the hub; ``None`` for that of the environment.
        random_weights: Take only the shape of a hub id, from the built-in ones.
        checkpointing: Compute activations of a block again in the backward pass.
    """

    name: str
    task: str
    seq_length: int
    token: str | None = None
    random_weights: bool = False
    checkpointing: bool = False

    @property
    def shape(self) -> Shape | None:
        """The built-in shape, if it is one."""
        name = SAME_SHAPE.get(self.name, self.name) if self.random_weights else self.name
        return SHAPES.get(name)

    @property
    def resolved_task(self) -> str:
        """The task; diffusion models have but one."""
        shape = self.shape
        return "denoise" if shape is not None and shape.family == "dit" else self.task


def build_model(request: ModelRequest, device: torch.device) -> nn.Module:
    """The model, in fp32 and training mode, on ``device``.

    Raises:
        UsageError: There is no such model, or it cannot be fetched; the text says what to do.
    """
    shape = request.shape
    if shape is None:
        model = _pretrained(request).to(device)
    elif shape.family == "own":
        model = _own(shape, request).to(device)
    elif shape.family == "dit":
        model = _dit(shape, request).to(device)
    else:
        config = _configuration(shape, request)
        with device:
            model = _class_for(request.resolved_task, shape.family)(config)
    if request.checkpointing:
        _checkpoint(model)
    return model.float().train()


def vocabulary(model: nn.Module, request: ModelRequest) -> int:
    """Number of tokens that inputs may have."""
    config = getattr(model, "config", None)
    if config is not None:
        return int(config.vocab_size)
    assert request.shape is not None
    return request.shape.sizes.get("vocab_size", 0)


def _own(shape: Shape, request: ModelRequest) -> nn.Module:
    from memory_test.common.dp_transformer import DPTransformer

    classes = CLASSES if request.task == "classify" else None
    return DPTransformer(**shape.sizes, max_length=request.seq_length, classes=classes)


def _dit(shape: Shape, request: ModelRequest) -> nn.Module:
    from memory_test.common.dit import DiT

    return DiT(**shape.sizes, tokens=request.seq_length)


def _configuration(shape: Shape, request: ModelRequest) -> Any:
    transformers = _transformers()
    common = {"use_cache": False, "tie_word_embeddings": shape.tied, "num_labels": CLASSES,
              "pad_token_id": 0, "attn_implementation": "sdpa"}  # fmt: skip
    if shape.family == "llama":
        return transformers.LlamaConfig(
            **shape.sizes, **common, max_position_embeddings=131072, rope_theta=500000.0
        )
    positions = max(1024, request.seq_length)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2Config(**shape.sizes, **common, **dropouts, n_positions=positions)


def _class_for(task: str, family: str) -> Callable[..., nn.Module]:
    transformers = _transformers()
    prefix = {"llama": "Llama", "gpt2": "GPT2"}[family]
    head = "GPT2LMHeadModel" if family == "gpt2" else "LlamaForCausalLM"
    return getattr(transformers, head if task == "lm" else f"{prefix}ForSequenceClassification")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "this model needs the package transformers (pip install transformers); the models "
            "tiny, small, medium, tiny-dit and dit-xl-2 do not"
        ) from error
    return transformers


def _pretrained(request: ModelRequest) -> nn.Module:
    name, folder = request.name, Path(request.name).expanduser()
    if not folder.is_dir() and ("/" not in name or name.startswith((".", "/", "~"))):
        raise UsageError(
            f"--model-name {name}: neither a folder nor an id of the hub (owner/name) nor a "
            f"built-in shape ({', '.join(SHAPES)})"
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UsageError(f"--model-name {name}: the folder has no config.json")
    transformers = _transformers()
    lm = request.task == "lm"
    auto = (
        transformers.AutoModelForCausalLM if lm else transformers.AutoModelForSequenceClassification
    )
    options: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
    options |= {} if lm else {"num_labels": CLASSES, "pad_token_id": 0}
    try:
        if folder.is_dir():
            return _from_folder(auto, folder, options)
        token = request.token or os.environ.get("HF_TOKEN") or None
        return auto.from_pretrained(name, token=token, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(_why_not_fetched(request, error)) from error


def _from_folder(auto: Any, folder: Path, options: dict[str, Any]) -> nn.Module:
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return auto.from_pretrained(folder, local_files_only=True, **options)
    config = _transformers().AutoConfig.from_pretrained(folder, local_files_only=True, **options)
    return auto.from_config(config)


def _why_not_fetched(request: ModelRequest, error: BaseException) -> str:
    name, chain, seen = request.name, error, []
    while chain is not None and len(seen) < 10:
        seen.append(f"{type(chain).__name__} {chain}")
        chain = chain.__cause__ or chain.__context__  # type: ignore[assignment]
    text = " ".join(seen).lower()
    same = SAME_SHAPE.get(name)
    without = (
        f" To measure without it: --model-name {same}, the same shape with random weights."
        if same
        else " Without it: a local folder, or a built-in shape with random weights."
    )
    if any(w in text for w in ("gated", "401", "403", "unauthorized", "token is required")):
        have = (
            "The token was refused" if request.token or os.environ.get("HF_TOKEN") else "No token"
        )
        return (
            f"--model-name {name}: the hub wants a token that may read it. {have}; give one by "
            f"--token or HF_TOKEN.{without}"
        )
    if any(w in text for w in ("connect", "offline", "resolve", "timed out", "proxy", "network")):
        return f"--model-name {name}: the hub cannot be reached.{without}"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"--model-name {name}: cannot be read ({first}).{without}"


def _checkpoint(model: nn.Module) -> None:
    options = {"use_reentrant": False}
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # transformers 5.2x, older
        enable = getattr(model, f"{name}_enable", None)
        if enable is not None:
            enable(**{f"{name}_kwargs": options})
            return
    model.checkpointing = True  # type: ignore[assignment]
