"""Small Llama-shaped models for texts, and the loss of a sequence.

Shapes: B samples, T tokens, V tokens in the vocabulary, K classes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
)
from transformers.utils import logging

# Target where a language model has nothing to predict.
IGNORE = -100

# Built-in shapes; weights are random.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "llama3-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


class TextClassifier(nn.Module):
    """A transformer whose last hidden states are averaged over the tokens of a sample.

    Under the noise of private training the average learns far better than the last token's state:
    every word reaches the head directly.
    """

    def __init__(self, backbone: PreTrainedModel, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.score = nn.Linear(backbone.config.hidden_size, classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits ``[B, K]`` from token numbers and their mask, ``[B, T]`` each."""
        states = self.backbone(input_ids=tokens, attention_mask=mask, use_cache=False)
        kept = mask.unsqueeze(-1).to(states.last_hidden_state.dtype)  # [B, T, 1]
        mean = (states.last_hidden_state * kept).sum(1) / kept.sum(1).clamp(min=1)
        return self.score(mean)


class LanguageModel(nn.Module):
    """A causal language model that returns its logits alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits of the next token, ``[B, T, V]``, from tokens and their mask, ``[B, T]``."""
        return self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


class SampleCrossEntropy(nn.Module):
    """Cross-entropy, one number a sample: for a sequence, the mean over its tokens.

    A sample whose targets are all :data:`IGNORE` has loss 0 and no gradient.

    Args:
        reduction: ``"none"`` for one loss a sample, ``"mean"`` for their mean.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of logits ``[B, K]`` or ``[B, T, V]`` against targets ``[B]`` or ``[B, T]``."""
        losses = F.cross_entropy(
            logits.movedim(-1, 1), targets, reduction="none", ignore_index=IGNORE
        )
        losses, targets = losses.unsqueeze(-1).flatten(1), targets.unsqueeze(-1).flatten(1)
        per_sample = losses.sum(1) / (targets != IGNORE).sum(1).clamp(min=1)
        return per_sample if self.reduction == "none" else per_sample.mean()


def local_folder(model: str) -> Path | None:
    """The folder that ``model`` names; None for a built-in shape.

    Raises:
        ValueError: It is neither.
    """
    if model in SHAPES:
        return None
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--model {model}: neither a built-in shape ({', '.join(SHAPES)}) nor a folder with "
            "a config.json (hf download NAME --local-dir FOLDER fetches one)"
        )
    return folder


def with_lora(model: PreTrainedModel, rank: int) -> nn.Module:
    """The model with LoRA adapters in its linear layers; they alone are trained.

    Args:
        model: Changed in place.
        rank: Rank of the adapters.

    Raises:
        ValueError: ``peft`` is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("--lora: needs peft; pip install peft") from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with warnings.catch_warnings():  # peft asks transformers by a name that is to go
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, config)


def build_model(
    model: str, *, task: str, vocab_size: int, classes: int, lora: int | None = None
) -> nn.Module:
    """A model for the task.

    Args:
        model: Built-in shape (random weights), or a local folder in the format of
            ``transformers`` (its weights; random ones if it holds a configuration only).
        task: ``"classify"`` or ``"lm"``.
        vocab_size: Number of tokens of the tokenizer.
        classes: Number of classes, for ``"classify"``.
        lora: Rank of LoRA adapters; ``None``: all weights are trained.

    Raises:
        ValueError: The model cannot be read, or its vocabulary is smaller than the tokenizer's.
    """
    folder = local_folder(model)
    if folder is None:
        config = LlamaConfig(vocab_size=vocab_size, use_cache=False, **SHAPES[model])
        inner = LlamaModel(config) if task == "classify" else LlamaForCausalLM(config)
    else:
        inner = _from_folder(folder, AutoModel if task == "classify" else AutoModelForCausalLM)
        if inner.config.vocab_size < vocab_size:
            raise ValueError(
                f"--model {model} has {inner.config.vocab_size} tokens, but the tokenizer has "
                f"{vocab_size}; use --tokenizer model or bytes"
            )
    if lora is not None:
        inner = with_lora(inner, lora)
    built = TextClassifier(inner, classes) if task == "classify" else LanguageModel(inner)
    return built.float().train()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of ``transformers``."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _from_folder(folder: Path, auto: type) -> PreTrainedModel:
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    logging.disable_progress_bar()  # a bar for each process and each time a model is read
    try:
        if weights:
            with quiet():
                return auto.from_pretrained(folder, local_files_only=True)
        return auto.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model {folder}: cannot be read ({error})") from error
