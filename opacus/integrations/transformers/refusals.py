"""What a private Trainer refuses, and why; before anything has been built or changed."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from opacus.integrations.transformers.arguments import DPArguments

# Values of TrainingArguments (and TRL's) that cannot be private: name, whether the value is unsafe,
# and the reason with what to do instead.
_UNSAFE: list[tuple[str, Any, str]] = [
    (
        "auto_find_batch_size", bool,
        "after an out-of-memory error it starts again with other batches, and the steps taken "
        "until then were released: set per_device_train_batch_size",
    ),
    (
        "dataloader_drop_last", bool,
        "Poisson sampling has no last, smaller batch: leave it out",
    ),
    ("deepspeed", bool, "its engine sums gradients before they are clipped: use fsdp"),
    (
        "fp16", bool,
        "a loss scaler skips steps depending on private data, which no guarantee covers: use "
        "bf16=True",
    ),
    (
        "use_liger_kernel", bool,
        "its fused layers and loss hide the examples' gradients: leave it out",
    ),
    (
        "neftune_noise_alpha", lambda alpha: alpha is not None,
        "the size of its noise depends on the longest text of the batch, and so an example's "
        "gradient on the others: leave it out",
    ),
    (
        "parallelism_config", lambda value: value is not None,
        "tensor, context and sequence parallelism split the examples: use DDP or fsdp",
    ),
    (
        "activation_offloading", bool,
        "it has not been tested with the hooks that tell examples apart: use "
        "gradient_checkpointing=True",
    ),
    (
        "packing", bool,
        "documents are packed into rows before they are sampled, so one document more or less "
        "changes which others share its row, and many rows differ between neighbouring data sets: "
        "set packing=False. Texts are padded by physical batch, which is small",
    ),
    (
        "padding_free", bool,
        "all texts become one row, where hooks cannot tell them apart: set padding_free=False",
    ),
    (
        "loss_type", lambda kind: kind == "dft",
        "only the mean log-likelihood of an example's tokens is computed by example: override "
        "per_sample_loss for another loss",
    ),
    (
        "optim", lambda name: any(w in str(name) for w in ("lomo", "layerwise")),
        "it updates parameters in the backward pass, before there is noise: use another one",
    ),
]  # fmt: skip


def refuse_arguments(args: Any, privacy: DPArguments) -> None:
    """Refuse what cannot be private.

    Args:
        args: ``TrainingArguments``, or TRL's.
        privacy: The arguments beside them.

    Raises:
        ValueError: It names the argument, its value and the reason.
    """
    for name, is_unsafe, reason in _UNSAFE:
        value = getattr(args, name, None)
        if value and is_unsafe(value):
            raise ValueError(f"{name}={_shown(value)} cannot be private: {reason}")
    _refuse_sampling(args, privacy)
    _refuse_sizes(args, privacy)
    if getattr(args, "n_gpu", 1) > 1:
        raise ValueError(
            f"one process with {args.n_gpu} GPUs would use nn.DataParallel, which mixes examples: "
            "start it with torchrun or accelerate launch, or set CUDA_VISIBLE_DEVICES"
        )


def _refuse_sizes(args: Any, privacy: DPArguments) -> None:
    size = privacy.expected_batch_size
    if size is None:
        return
    parts, world = args.gradient_accumulation_steps, max(1, args.world_size)
    if parts > 1:
        raise ValueError(
            f"expected_batch_size={size} and gradient_accumulation_steps={parts} both say how many "
            "examples a step draws: leave one of them out"
        )
    if not privacy.poisson_sampling and size % world:
        raise ValueError(
            f"expected_batch_size={size} is no multiple of the {world} processes, and without "
            "Poisson sampling each takes as many examples: choose another size"
        )


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))


def _refuse_sampling(args: Any, privacy: DPArguments) -> None:
    strategy = getattr(args, "train_sampling_strategy", "random")
    grouped = getattr(args, "group_by_length", False) or strategy not in ("random", "sequential")
    if grouped or (privacy.poisson_sampling and strategy != "random"):
        raise ValueError(
            f"train_sampling_strategy={_shown(strategy)} cannot be private: which examples are in "
            "a batch would depend on each other, and the accountant assumes that each is drawn "
            "independently. Leave it out; chunks are padded by themselves"
        )
    config = getattr(args, "accelerator_config", None)
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name, None):
            raise ValueError(
                f"accelerator_config.{name}=True cannot be private: each process draws its own "
                "examples. Leave it out"
            )


def refuse_data(dataset: Any) -> None:
    """Refuse training sets that cannot be sampled.

    Raises:
        ValueError: There is none, it is iterable, or it is empty.
    """
    if dataset is None:
        raise ValueError("train_dataset is needed: epsilon is counted for its examples")
    iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    if iterable or type(dataset).__name__ == "IterableDataset":
        raise ValueError(
            "train_dataset is iterable: Poisson sampling needs any example at any time. Use a "
            "map-style data set (datasets.load_dataset without streaming=True)"
        )
    if len(dataset) == 0:
        raise ValueError("train_dataset has no examples")


def refuse_model(model: Any) -> None:
    """Refuse models whose training loss joins the examples of a batch.

    Raises:
        ValueError: A mixture of experts with a balancing loss.
    """
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "model.config.output_router_logits=True adds a loss that balances experts over all "
            "examples of a batch, which cannot be clipped by example: set it to False (TRL sets it "
            "unless router_aux_loss_coef=0)"
        )
