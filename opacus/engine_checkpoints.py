"""The one-file checkpoints of a privacy engine."""

from __future__ import annotations

import os
from typing import Any, BinaryIO, ClassVar

from opacus.checkpoints.one_file import load_training_state, save_training_state
from opacus.core.privacy.key import NOISE
from opacus.core.ranks.parallelism import Single
from opacus.engine_accounting import EngineAccounting
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from opacus.schedulers import _GradClipScheduler, _NoiseScheduler


class EngineCheckpoints(EngineAccounting):
    """Checkpoints of what an engine has made private, and of what it has spent."""

    # Of the criterion of adaptive clipping in ghost modes.
    _criterion_keywords: ClassVar[frozenset[str]] = frozenset()
    _parallelisms: list[Single]  # of the optimizers that were made private

    def _moves_clipping_norm(self, optimizer: Any) -> bool:
        """Whether C is a state of training, and no setting."""
        return bool(self._criterion_keywords) or isinstance(optimizer, AdaClipDPOptimizer)

    def _skip_known_steps(self) -> None:
        """Keep optimizers of this engine from drawing the noise of a counted step again."""
        for parallelism in self._parallelisms:
            parallelism.key.at_least({NOISE: len(self.accountant)})

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | BinaryIO,
        module: Any,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: _NoiseScheduler | None = None,
        grad_clip_scheduler: _GradClipScheduler | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Save model, accountant and, if given, schedulers, optimizer and the state of its noise.

        Under FSDP2 every rank must call this; the whole, unsharded state is written by
        rank 0 (to a file) or by every rank (to a buffer), so that it loads into any
        number of ranks. A file is replaced only when it has been written completely.

        Args:
            path: File, or writable binary buffer.
            module: The private module, or its hooks object.
            optimizer: The private optimizer.
            noise_scheduler, grad_clip_scheduler: Schedulers of sigma and of C.
            checkpoint_dict: Further entries, kept as they are.
            module_state_dict_kwargs, torch_save_kwargs: For ``state_dict``, ``torch.save``.
        """
        save_training_state(
            path,
            accountant=self.accountant,
            module=module,
            optimizer=optimizer,
            schedulers=_by_key(noise_scheduler, grad_clip_scheduler),
            extra=checkpoint_dict,
            state_dict_kwargs=module_state_dict_kwargs,
            save_kwargs=torch_save_kwargs,
        )

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | BinaryIO,
        module: Any,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: _NoiseScheduler | None = None,
        grad_clip_scheduler: _GradClipScheduler | None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` saved, also into another number of ranks.

        Args:
            path: File, or readable binary buffer.
            module: The private module, or its hooks object, or a plain model.
            optimizer: The private optimizer.
            noise_scheduler, grad_clip_scheduler: Schedulers of sigma and of C.
            module_load_dict_kwargs, torch_load_kwargs: For ``load_state_dict``, ``torch.load``.

        Returns:
            The whole checkpoint.

        Raises:
            ValueError: The checkpoint is of another model; nothing has been loaded then.
        """
        checkpoint = load_training_state(
            path,
            accountant=self.accountant,
            module=module,
            optimizer=optimizer,
            schedulers=_by_key(noise_scheduler, grad_clip_scheduler),
            adaptive=self._moves_clipping_norm(optimizer),
            state_dict_kwargs=module_load_dict_kwargs,
            load_kwargs=torch_load_kwargs,
        )
        self._skip_known_steps()
        return checkpoint


def _by_key(noise: Any, clip: Any) -> dict[str, Any]:
    return {"noise_scheduler_state_dict": noise, "grad_clip_scheduler_state_dict": clip}
