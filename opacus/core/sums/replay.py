"""Runs blocks of the model again for the clipped sum, where their records were not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.platform.sharded import is_fsdp
from opacus.core.record.blocks import Block, Visit
from opacus.core.record.record import Record
from opacus.core.sums.seen import BLOCK_ADVICE, Seen, described
from opacus.core.sums.weighting import Weighting


class Replay:
    """The sums of blocks that run again, each when its first parameter is asked for.

    Every rank that shares a block gathers its weights, also if it has its own records of it.

    Args:
        agreed: Blocks that any rank replays.
        visits: Those of this rank.
        weighting: Of the records.
        seen: Fingerprints of their records in the norm pass.
        recording: Context in which layers are tapped as of a forward pass, for the sink given.
    """

    def __init__(
        self,
        agreed: Iterable[Block],
        visits: Iterable[Visit],
        weighting: Weighting,
        seen: Seen,
        recording: Callable[[Any, Callable[[Record], None]], AbstractContextManager[None]],
    ) -> None:
        self._visits = {id(visit.block): visit for visit in visits}
        self._block_of = {owner: block for block in agreed for owner in block.owners}
        self._weighting, self._seen, self._recording = weighting, seen, recording
        self._sums: dict[str, Tensor] = {}
        self._owners: set[str] = set()

    def terms_of(self, owner: str) -> list[Callable[[], Tensor]]:
        """The term of a parameter that is replayed, none of another one."""
        block = self._block_of.get(owner)
        if block is not None:
            for own in block.owners:
                del self._block_of[own]
            self._run(block, next(reversed(self._block_of.values()), None))
        if owner not in self._sums:
            return []
        total = self._sums.pop(owner)
        return [lambda: total]

    def _run(self, block: Block, following: Block | None) -> None:
        visit = self._visits.pop(id(block), None)
        with _gathered(block.module, None if following is None else following.module):
            if visit is not None:
                self._again(visit)

    def _again(self, visit: Visit) -> None:
        """Run a block forward and backward.

        Raises:
            RuntimeError: A layer that was measured does not come again; names it.
        """
        missing = set(visit.names)

        def take(record: Record) -> None:
            if record.spec.name not in visit.names:
                return
            missing.discard(record.spec.name)
            self._seen.replayed(record)
            for name, total in self._weighting.sums(record).items():
                owner = record.layer.owners[name]
                known = self._sums.get(owner)
                self._sums[owner] = total if known is None else known + total

        assert visit.gradient is not None
        with self._recording(visit.forward_pass, take):
            output = visit.run()
            torch.autograd.backward([output], [visit.gradient.to(output.dtype)])
        if missing:
            raise RuntimeError(f"{described(min(missing))}: nothing. {BLOCK_ADVICE}")
        visit.let_go()


@contextmanager
def _gathered(module: nn.Module, following: nn.Module | None) -> Iterator[None]:
    """A block with its parameters; those of the one after it are gathered meanwhile."""
    if not is_fsdp(module):
        yield
        return
    module.unshard()
    try:
        if following is not None and is_fsdp(following):
            following.unshard(async_op=True)
        yield
    except BaseException:
        if following is not None and is_fsdp(following):  # its weights may be others by then
            following.unshard()
            following.reshard()
        raise
    finally:
        module.reshard()
