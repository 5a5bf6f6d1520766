"""Sharded checkpoints of a private run, to which it resumes on any number of ranks.

Model and optimizer are saved by ``torch.distributed.checkpoint``: each rank writes its own shards,
and they are dealt out anew if there are more or fewer ranks when they are read. Beside them are
the accountant, the schedulers, the position in the data and the random state.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from opacus.checkpoints import folder as files
from opacus.checkpoints.folder import Mark, all_or_none, gathered, latest_checkpoint
from opacus.checkpoints.names import unwrapped
from opacus.checkpoints.noise_state import check_noise, noise_entries, restore_noise
from opacus.checkpoints.one_file import check_plan, privacy_parameters, warn_of_changes
from opacus.checkpoints.positions import LoaderPosition
from opacus.checkpoints.random_state import RandomState, Secret
from opacus.checkpoints.tensors import check_model, load_tensors, save_tensors
from opacus.core.ranks.parallelism import DataParallel
from opacus.optimizers import DPOptimizer
from opacus.privacy_engine import PrivacyEngine

__all__ = ["Checkpointer", "Progress", "latest_checkpoint", "read_extra"]

_FORMAT = 1
_SHARED = "run.pt"


@dataclass(frozen=True)
class Progress:
    """How far a run had come.

    Attributes:
        step: Steps taken, one for each logical batch.
        epoch: Number of the epoch to go on with. If it was under way, the data loader's next pass
            yields what is left of it, maybe nothing.
        extra: What was given to :meth:`Checkpointer.save`.
        path: The checkpoint, ``None`` if there was none.
    """

    step: int = 0
    epoch: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


class Checkpointer:
    """Saves a private run again and again, and resumes it after it was killed.

    Create it right after ``make_private``, on all ranks::

        checkpoints = Checkpointer("run", engine=engine, module=model, optimizer=optimizer,
                                   data_loader=loader)
        progress = checkpoints.load()  # changes nothing if there is no checkpoint
        for epoch in range(progress.epoch, epochs):
            for batch in loader:
                ...
                optimizer.step()
                checkpoints.save_every(100)
            checkpoints.save(epoch_ended=True)

    Load last: what draws random numbers between ``load()`` and the training loop, and not in an
    uninterrupted run, makes the two differ.

    Guarantee: a run that is killed at any moment, also while it saves, and resumed goes on with
    the same epsilon, and draws no noise and no coin toss of Poisson sampling a second time: a
    checkpoint holds the number of the next step, and the public name of the noise's key. A
    resumed run has another key. If noise (``noise_generator``) and sampling (the loader's
    generator), or both (``OPACUS_REPRODUCIBLE=1``), come from seeds, in the saved run and in the
    resumed one, the checkpoint holds their keys, too: then, on as many ranks, it goes on as if it
    had not been killed, with the same batches, noise and dropout; and with the same batches and
    noise on another number of ranks.

    What a killed run computed after its last checkpoint must not be released: if the run resumes
    those steps are taken again, maybe with other noise, and are counted once. Checkpoints hold the
    private data's trace in full precision (the optimizer's state, the random state of dropout and
    of the order of samples): keep them secret, and release the model alone.

    Args:
        folder: Where the checkpoints are, one folder each; on storage that all nodes share. It
            must be of this run alone.
        engine: The engine; its accountant is saved.
        module: The private module, or its hooks object.
        optimizer: The private optimizer.
        data_loader: The loader that ``make_private`` returned, to save the position in it.
            Without it a resumed run draws new batches.
        schedulers: Objects with ``state_dict`` and ``load_state_dict`` by name: of the noise, the
            clipping norm, the learning rate. Equal on all ranks.
        keep: How many checkpoints stay; older ones are deleted.
        scaler: The run's ``GradScaler``; its scale and growth are saved for each rank.

    Raises:
        ValueError: ``keep`` is below 1, or ``data_loader`` does not draw batches of indices.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        engine: PrivacyEngine,
        module: Any,
        optimizer: DPOptimizer,
        data_loader: DataLoader[Any] | None = None,
        schedulers: Mapping[str, Any] | None = None,
        keep: int = 2,
        scaler: GradScaler | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self.step = 0
        self._engine, self._optimizer = engine, optimizer
        self._module = unwrapped(module)
        self._index = _index_of(module, optimizer)
        self._schedulers = dict(schedulers or {})
        self._scaler = scaler
        self._secret = Secret()
        self._last: Mark | None = None  # of the checkpoint that was saved or loaded last
        noise = optimizer.generator
        self._position = None if data_loader is None else LoaderPosition(data_loader, noise)
        sampling = [] if self._position is None else self._position.generators
        self._random = RandomState(noise, sampling)
        optimizer.register_step_post_hook(self._count)

    def _count(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer._is_last_step_skipped:  # a physical batch that was not the last one
            return
        self.step += 1
        if self._position is not None:
            self._position.count(optimizer.accumulated_iterations)

    # --- saving ---

    def save_every(self, steps: int, extra: Mapping[str, Any] | None = None) -> Path | None:
        """Save if a multiple of ``steps`` has been taken. Call it after each ``optimizer.step()``.

        It does nothing after a physical batch that is not the last of its logical batch.

        Args:
            steps: Distance between checkpoints.
            extra: See :meth:`save`.

        Returns:
            The new checkpoint, ``None`` if none was due.

        Raises:
            ValueError: ``steps`` is below 1.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        due = self.step > 0 and self.step % steps == 0 and not self._in_logical_batch()
        is_new = self._last is None or self._last < Mark(self.step, False)
        return self.save(extra=extra) if due and is_new else None

    def save(self, *, epoch_ended: bool = False, extra: Mapping[str, Any] | None = None) -> Path:
        """Save the run; a collective call. What is saved already is not saved again.

        Args:
            epoch_ended: The pass over the loader is over, and so is what is done after it (moving
                a learning rate, say): a resumed run starts with the next epoch. Otherwise it
                goes on within this one, even if no batch of it is left.
            extra: Further entries, equal on all ranks: plain types and tensors.

        Returns:
            The folder of the checkpoint.

        Raises:
            RuntimeError: In the middle of a logical batch, or a rank could not write.
            ValueError: The folder holds checkpoints of another run.
        """
        mark = Mark(self.step, epoch_ended)
        if self._last is not None and mark <= self._last:
            return self.folder / str(self._last)
        rank, size = files.rank_and_size()
        started = None
        with all_or_none("saving a checkpoint"):
            self._check_can_save()
            if rank == 0:
                self._check_folder()
                started = str(files.begin(self.folder, mark))
        unfinished = Path(gathered(started)[0])
        if epoch_ended and self._position is not None:
            self._position.end_epoch()
        written = self._write(unfinished, rank, dict(extra or {}))
        with all_or_none("saving a checkpoint"):
            seals = files.seals(written)
        every = {name: seal for of_rank in gathered(seals) for name, seal in of_rank.items()}
        about = {"format": _FORMAT, "step": self.step, "world_size": size}
        with all_or_none("saving a checkpoint"):
            if rank == 0:
                files.finish(unfinished, mark, every, about)
                files.keep_newest(self.folder, self.keep)
        self._last = mark
        return self.folder / str(mark)

    def _in_logical_batch(self) -> bool:
        return bool(self._optimizer._is_last_step_skipped or self._optimizer._step_skip_queue)

    def _check_can_save(self) -> None:
        if self._in_logical_batch():
            raise RuntimeError(
                "a logical batch is under way, and its sums are not part of a checkpoint: save "
                "after its last physical batch, with save_every() for example"
            )

    def _check_folder(self) -> None:
        newest = latest_checkpoint(self.folder)
        mark = None if newest is None else Mark.of(newest)
        if mark is not None and mark != self._last:
            raise ValueError(
                f"{self.folder} holds {mark}, which this run has neither saved nor loaded last: "
                "call load() first, choose another folder, or delete what is to be given up"
            )

    def _write(self, path: Path, rank: int, extra: dict[str, Any]) -> list[Path]:
        """Write this rank's part; the files that it consists of."""
        self._optimizer._parallelism.key.agree()  # rank 0 alone writes it
        with all_or_none("saving a checkpoint"):
            torch.save(self._state_of_rank(), path / _rank_file(rank))
            if rank == 0:
                torch.save(self._shared_state(extra), path / _SHARED)
        save_tensors(path, self._module, self._optimizer.original_optimizer)
        own = [path / _rank_file(rank), *path.glob(f"__{rank}_*")]
        return own if rank else [*own, path / _SHARED, path / ".metadata"]

    def _state_of_rank(self) -> dict[str, Any]:
        return {
            "random": self._random.state(),
            "position": None if self._position is None else self._position.state(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def _shared_state(self, extra: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": self.step,
            "world_size": files.rank_and_size()[1],
            "secret": self._secret.text,
            "noise": noise_entries(self._optimizer),
            "accountant": self._engine.accountant.state_dict(),
            "schedulers": {name: s.state_dict() for name, s in self._schedulers.items()},
            "mechanism": privacy_parameters(self._optimizer),
            "per_layer": self._optimizer._privacy.max_grad_norms,
            "has_optimizer": bool(self._optimizer.original_optimizer.state),
            "extra": extra,
        }

    # --- loading ---

    def load(self, path: str | os.PathLike[str] | None = None) -> Progress:
        """Resume from a checkpoint; a collective call.

        Args:
            path: The checkpoint; by default the newest complete one in the folder. A run that
                resumes from an older one saves only once the newer ones are deleted.

        Returns:
            How far the run had come; all zeros if there is no checkpoint.

        Raises:
            ValueError: The checkpoint is incomplete, damaged or of another model; the same error
                on all ranks, and nothing has been changed.
        """
        found = latest_checkpoint(self.folder) if path is None else Path(path)
        name = gathered(None if found is None else str(found))[0]
        if name is None:
            return Progress()
        chosen = Path(name)
        rank, size = files.rank_and_size()
        with all_or_none(f"loading the checkpoint {chosen}"):
            manifest = _read_manifest(chosen)
            files.verify(chosen, manifest["files"], rank, size)
            shared = torch.load(chosen / _SHARED, map_location="cpu")
            # The accountant's own checks, on a copy.
            type(self._engine.accountant)().load_state_dict(shared["accountant"])
            self._check_schedulers(shared["schedulers"])
            check_plan(self._optimizer, shared["mechanism"])
            check_noise(self._optimizer, shared.get("noise") or {}, steps=shared["step"])
            check_model(chosen, self._module)
            same = shared["world_size"] == size
            own = torch.load(chosen / _rank_file(rank if same else 0), map_location="cpu")
            self._check_scaler(own.get("scaler"))
        self._optimizer.reset_accumulation()
        self._optimizer.zero_grad(set_to_none=True)
        load_tensors(
            chosen,
            self._module,
            self._optimizer.original_optimizer,
            has_optimizer=shared["has_optimizer"],
        )
        self._load_shared(shared)
        if self._scaler is not None:
            self._scaler.load_state_dict(own.get("scaler") or {})
        self._load_randomness(shared, own, same)
        if path is None or chosen.parent.resolve() == self.folder.resolve():
            self._last = Mark.of(chosen)
        epoch = 0 if self._position is None else self._position.epoch
        return Progress(self.step, epoch, shared["extra"], chosen)

    def _check_schedulers(self, saved: Mapping[str, Any]) -> None:
        if saved.keys() != self._schedulers.keys():
            raise ValueError(
                f"it was saved with schedulers named {sorted(saved)}, and the Checkpointer was "
                f"given {sorted(self._schedulers)}"
            )

    def _check_scaler(self, saved: dict[str, Any] | None) -> None:
        """Refuse a scaler's state that would be lost, or a scaler without a saved state.

        A disabled scaler has an empty state, which only a disabled one takes.
        """
        own = None if self._scaler is None else self._scaler.state_dict()
        if bool(saved) != bool(own):
            raise ValueError(
                f"it was saved {'with' if saved else 'without'} the state of a GradScaler, and the "
                f"Checkpointer was given {_described(self._scaler)}: pass scaler= as in the run "
                "that saved it"
            )

    def _load_shared(self, shared: dict[str, Any]) -> None:
        self.step = shared["step"]
        self._engine.accountant.load_state_dict(shared["accountant"])
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(shared["schedulers"][name])
        if self._engine._moves_clipping_norm(self._optimizer):
            norm = shared["per_layer"] or shared["mechanism"]["max_grad_norm"]
            self._optimizer.max_grad_norm = norm
        warn_of_changes(self._optimizer, shared["mechanism"])

    def _load_randomness(self, shared: dict[str, Any], own: dict[str, Any], same: bool) -> None:
        secret = Secret(shared["secret"])
        size = files.rank_and_size()[1]
        self._secret = secret if same else secret.next(self.step, size)
        restore_noise(self._optimizer, shared.get("noise") or {}, steps=self.step, taken=0)
        natural = [] if self._position is None else self._position.settled_by_replay

        def settle(natural: Any = natural) -> None:
            if same:
                self._random.restore(own["random"], natural)
            else:
                self._random.renew(self._secret, self._index)

        settle(natural=())
        if self._position is not None and own["position"] is not None:
            self._resume_position(own["position"], same, settle)

    def _resume_position(self, state: dict[str, Any], same: bool, settle: Any) -> None:
        assert self._position is not None
        if not self._position.resume(state, same, settle):
            warnings.warn(
                "the loader's sampler cannot go on in the middle of an epoch on another number of "
                "ranks: what is left of the epoch is drawn in a new order, so that samples may "
                "come twice or not at all in it. Poisson sampling has no such limit",
                stacklevel=4,
            )


def read_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``extra`` entries of a checkpoint; neither model nor optimizer is read.

    Args:
        path: A checkpoint, or a folder of them, of which the newest is meant.

    Raises:
        ValueError: It is not a complete checkpoint.
    """
    chosen = Path(path)
    if not (chosen / files.MANIFEST).is_file():
        chosen = latest_checkpoint(chosen) or chosen
    manifest = _read_manifest(chosen)
    files.verify(chosen, {_SHARED: manifest["files"].get(_SHARED, (0, ""))}, 0, 1)
    return torch.load(chosen / _SHARED, map_location="cpu")["extra"]  # type: ignore[no-any-return]


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = files.read_manifest(path)
    if manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')!r}; this version reads {_FORMAT}"
        )
    return manifest


def _index_of(module: Any, optimizer: DPOptimizer) -> int:
    """Number of this rank among those that hold different samples."""
    ranks = getattr(module, "_ranks", None)
    if ranks is not None:
        return int(ranks.index)
    parallelism = optimizer._parallelism
    return parallelism.rank if isinstance(parallelism, DataParallel) else 0


def _described(scaler: GradScaler | None) -> str:
    if scaler is None:
        return "no scaler"
    return "a scaler" if scaler.is_enabled() else "a scaler that is not enabled"


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"
