"""What a user's own Trainer may not override, as private training would leave it out."""

from __future__ import annotations

from typing import Any

from opacus.integrations.transformers.batches import ChunkedCollate

# Methods of a Trainer in whose place the mixin has its own.
_REPLACED = ("training_step", "get_train_dataloader", "get_batch_samples")
_THEIRS = ("transformers", "trl", "opacus")


def refuse_overridden_loss(trainer: type, mixin: type) -> None:
    """Refuse a Trainer whose own loss would be left out without a word.

    Raises:
        TypeError: It overrides ``compute_loss`` and not ``per_sample_loss``.
    """
    if trainer.per_sample_loss is not mixin.per_sample_loss:  # type: ignore[attr-defined]
        return
    owner = next(c for c in trainer.__mro__ if "compute_loss" in c.__dict__)
    if owner.__module__ not in ("transformers.trainer", "trl.trainer.sft_trainer"):
        raise TypeError(
            f"{owner.__name__}.compute_loss returns one loss for the whole batch, which cannot be "
            "clipped by example. Override per_sample_loss(self, outputs, inputs) too, to return "
            "one loss an example; compute_loss is used for evaluation only"
        )


def refuse_replaced_methods(trainer: type, mixin: type, *, poisson: bool) -> None:
    """Refuse a Trainer with methods of its own that would be left out without a word.

    Raises:
        TypeError: It names the class, the method and the reason.
    """
    order = trainer.__mro__
    for name in _REPLACED:
        owner = _first_with(name, order[order.index(mixin) :])
        if owner is not None:
            raise TypeError(
                f"{owner.__name__}.{name} would never run: DPTrainerMixin comes before it, and has "
                f"its own. Remove it, or override {name} in {trainer.__name__}, and call super()"
            )
    owner = _first_with("_get_train_sampler", order)
    if poisson and owner is not None:
        raise TypeError(
            f"{owner.__name__}._get_train_sampler would never run: each example is drawn "
            "independently and equally often, as the accountant assumes. Remove it"
        )


def _first_with(name: str, classes: tuple[type, ...]) -> type | None:
    """The first class that defines a method, if that is one of the user's."""
    owners = (c for c in classes if name in vars(c) and c.__module__.split(".")[0] not in _THEIRS)
    return next(owners, None)


def chunked_collate(loader: Any) -> ChunkedCollate:
    """The collate function of a Trainer's own loader.

    Raises:
        TypeError: ``get_train_dataloader`` was overridden.
    """
    collate = getattr(loader, "collate_fn", None)
    collate = getattr(collate, "wrapped_collator_fn", collate)
    if not isinstance(collate, ChunkedCollate):
        raise TypeError(
            "get_train_dataloader must return what DPTrainer's returns, which draws each example "
            "independently and splits a draw into physical batches: do not override it, or call "
            "super().get_train_dataloader(). Change train_dataset or data_collator instead"
        )
    return collate
