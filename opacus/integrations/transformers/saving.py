"""What a private Trainer writes and reads: models, checkpoints, model cards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from opacus.core.platform.sharded import is_fsdp
from opacus.integrations.transformers import checkpoints
from opacus.integrations.transformers.card import Guarantee


class PrivateSaving:
    """Overrides of a Trainer's own; the base of ``DPTrainerMixin``.

    Guarantee: what is saved is what the Trainer saves, with the model's own names. A sharded
    model and its optimizer are saved whole, so that they load on any number of processes.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    args: Any
    state: Any
    privacy_engine: Any
    delta: float
    _accumulation: int
    _filters_losses: bool
    _gathered: Any = None  # the weights, while a sharded model is saved

    def guarantee(self) -> Guarantee:
        """What has been guaranteed so far."""
        raise NotImplementedError

    @property
    def _sharded(self) -> bool:
        return is_fsdp(self.model)

    @contextmanager
    def _arguments_as_given(self) -> Iterator[None]:
        """``args`` are those of the user: what private training does itself, it takes from them."""
        ours = self.args
        self.args = copy.copy(ours)
        self.args.gradient_accumulation_steps = self._accumulation
        self.args.logging_nan_inf_filter = self._filters_losses
        try:
            yield
        finally:
            self.args = ours

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with a section on the guarantee."""
        with self._arguments_as_given():
            super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            self.guarantee().write(self.args.output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; all ranks gather shards, also where only one of them writes."""
        self._gathered = checkpoints.whole_weights(self.model) if self._sharded else None
        try:
            super().save_model(output_dir, _internal_call=_internal_call)  # type: ignore[misc]
        finally:
            self._gathered = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        if state_dict is None:
            state_dict = self._gathered
        with self._arguments_as_given():  # they are saved, too
            super()._save(folder, state_dict=state_dict)  # type: ignore[misc]
        if not self.args.should_save:
            return
        if self._sharded and hasattr(self.model, "peft_config"):
            own = checkpoints.trainable_weights(self.model, state_dict)
            torch.save(own, Path(folder) / checkpoints.TRAINABLE)
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            self.guarantee().write(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._sharded:
            state = checkpoints.whole_optimizer(self.model, self.optimizer)
            if self.args.should_save:
                torch.save(state, Path(output_dir) / "optimizer.pt")
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")
        else:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            step = self.state.global_step
            checkpoints.save_privacy(
                output_dir, self.privacy_engine, self.optimizer, self.delta, step
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.read_privacy(resume_from_checkpoint)  # refuses before anything is loaded
        if self._sharded:
            checkpoints.load_weights(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._sharded or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        checkpoints.load_whole_optimizer(self.model, self.optimizer, checkpoint)
        scheduler = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        if self._sharded:
            checkpoints.load_weights(self.model, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()  # type: ignore[misc]
