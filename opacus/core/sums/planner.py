"""Decides what a single backward pass keeps of each layer for the clipped sum.

``"store"``: the per-sample gradients, formed once; their norm is a reading of them, and
the sum weights them. No matrix work beyond that of ordinary training, ``B n`` elements.

``"keep"``: activations and backprops. The norm is computed from them (by Gram matrices or
in pieces, whichever is cheaper), the weighted gradient by one product later.

``"offload"``: either of these, in host memory, where no more may be held and copying back is faster
than a replay.

``"replay"``: nothing, where no more may be held; the layer's block runs forward and backward once
more, from what it was given and the gradient of its output.

All are exact; the choice changes speed and memory only.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from opacus.core.platform.host_share import host_share
from opacus.core.platform.memory import in_use
from opacus.core.platform.sizes import CHUNK_ELEMENTS
from opacus.core.record.blocks import Blocks, Visit
from opacus.core.record.record import Record
from opacus.core.sums.choice import Choice, compare
from opacus.core.sums.rates import host_rate, rates_of
from opacus.core.sums.report import Report
from opacus.core.sums.room import Room, Size
from opacus.core.sums.rounding import Rounding
from opacus.core.sums.seen import Seen

# A replay is a forward pass and a backward pass, in forward passes.
REPLAYED_FORWARDS = 3
# How much longer a block takes than its products alone: attention and what is elementwise
# (measured: 26 ms of 14, 3B at 4x4096 on an H200).
BESIDE_PRODUCTS = 1.8
# Most bytes that the norms of several layers need at once, where one needs less.
STACKED_BYTES = 4 * CHUNK_ELEMENTS
# Choices that are remembered.
MOST_KNOWN = 10_000


class Planner:
    """Chooses for each record of one backward pass.

    Args:
        budget_bytes: Memory that may be held; beyond it whatever is smaller is held.
            ``None``: no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.blocks: Blocks | None = None  # that can be run again
        self.seen = Seen(all_tensors=True)
        self.peak_bytes: int | None = None
        self._most = budget_bytes
        self.largest_block = 0  # bytes that are held of the block with the most
        # Host memory that may be used, None: a share of what there is; and that is used.
        self.host_budget: int | None = None
        self.host_bytes = 0
        self.report = Report()
        self.rounding: Rounding | None = None  # where gradients are stored in float8
        self._base: int | None = None  # bytes in use beside what is held, when nothing runs
        self._in_sum = self._spare = self._forced = 0
        self._of_element = 0.0  # bytes of a sum, an element
        # By which what is held shrinks when its sums have been formed, and grows as blocks run
        # again after that.
        self._freed = self._grown = 0
        self._stacks = 0  # bytes that norms need where several are taken at once
        self._looked: Visit | None = None
        self._transient = self._again_needs = 0  # bytes that a block's backward, and replay, need
        self.looks = False  # whether blocks of this step may have to run again, or to leave
        self._room = Room()
        self._size, self._begun = Size(0, 0, 0, False), 0  # of the step, and bytes in use then
        self._known: dict[Hashable, Choice] = {}
        self._held_of: dict[Hashable, int] = {}  # bytes, of a block that is like another one

    def start(
        self,
        budget_bytes: int | None,
        peak_bytes: int | None = None,
        *,
        units: int = 0,
        in_sum: int = 0,
        of_element: float = 0.0,
        spare: int = 0,
        again: int = 0,
    ) -> None:
        """Begin a new backward pass.

        Args:
            budget_bytes: Memory that may be held; ``None``: no limit.
            peak_bytes: Memory of the device that may be in use at any time of the step.
            units: Losses.
            in_sum: Memory that forming sums needs for a while beside what is held.
            of_element: Bytes of a parameter's sum, an element, which stay.
            spare: Bytes of either limit that are not used.
            again: How many blocks run again in any case, where there is a limit.
        """
        self._in_sum, self._spare, self._forced = in_sum, spare, again
        self._of_element, self._freed, self._grown = of_element, 0, 0
        self.peak_bytes, self._looked = peak_bytes, None
        self._transient = self._again_needs = self._stacks = 0
        self.held_bytes = self.host_bytes = 0
        self._most = budget_bytes
        self.budget_bytes = self._limit()
        self.seen = Seen(all_tensors=True)
        self.report = Report(peak_bytes, units)
        self.looks = self.blocks is not None and not self._is_known(self.blocks, units)
        if self.looks:
            self.largest_block = 0
        if self.blocks is not None:
            self.blocks.start()
        if self.rounding is not None:
            self.rounding.start()

    def _is_known(self, blocks: Blocks, units: int) -> bool:
        """Whether a step is not looked at: one like it had room."""
        most = None if self._most is None else self._most - self._spare
        free = None
        if self.peak_bytes is not None:
            self._begun = in_use()
            free = self.peak_bytes - self._spare - self._begun
        given, rounded = blocks.given, self.rounding is not None
        self._size = Size(units, given, len(blocks.found), rounded)
        if self._forced or not self._room.has(self._size, most, free):
            return False
        if most is not None or free is not None:
            self.report.expect(self._begun + self._room.growth)
            self.budget_bytes = self._room.held
        return True

    def replays(self, record: Record) -> Visit | None:
        """The visit of a block that is run again, so that nothing of ``record`` is held.

        That is chosen when nothing more of the block may be held: what has been held of it until
        then is to be dropped.
        """
        visit = None if self.blocks is None else self.blocks.of(record)
        if visit is None or self.budget_bytes is None or not record.layer.rule.norm_is_local:
            return None
        assert self.blocks is not None
        self._look(visit)
        if visit.stays or visit.leaves:
            return None
        choice = self._choice(record)
        self.seen.measured(record)
        if not visit.chosen:
            rest = self._held_of.get(self._kind(visit), 0) - visit.held  # else it is formed in vain
            if self._has_room(visit, max(rest, min(choice.bytes.values()))):
                return None
            if self._leaves(visit, choice):
                return None
            visit.chosen = True
            self.report.expect_time("replay", self._again(visit))
            self.blocks.chosen.append(visit)
            self.held_bytes += visit.bytes - visit.held
            self._freed -= visit.freed
            self._grown += int(self._of_element * visit.block.elements) - visit.bytes
            self.report.change(visit.names, "replay")
        self.report.choices[choice.layer] = replace(choice, what="replay")
        return visit

    def _leaves(self, visit: Visit, choice: Choice) -> bool:
        """Whether a block for which there is no room is sent to host memory: if that is faster."""
        known = self._held_of.get(self._kind(visit))
        guess = max(2 * visit.held, self.largest_block, min(choice.bytes.values()))
        expected = guess if known is None else known
        if self.host_bytes + expected > self.host_room(visit.place[0]):
            return False
        back = expected / host_rate(visit.place[0])
        if back > self._again(visit):
            return False
        visit.leaves = True
        self.report.expect_time("offload", back)
        self.held_bytes -= visit.held
        self._freed -= visit.freed
        self.host_bytes += visit.held
        self.report.change(visit.names, "offload")
        return True

    def host_room(self, device: torch.device) -> int:
        """Bytes of host memory that may be used."""
        return host_share(device) if self.host_budget is None else self.host_budget

    def _kind(self, visit: Visit) -> Hashable:
        """The same for blocks of which as much is held: as large ones that are given the same."""
        return visit.block.elements, visit.shapes, self.rounding is None

    def _again(self, visit: Visit) -> float:
        """Seconds that a block takes to run again."""
        products = REPLAYED_FORWARDS * visit.tokens * visit.block.elements
        return BESIDE_PRODUCTS * products / rates_of(*visit.place).multiply_adds

    def leaving(self) -> Visit | None:
        """The visit whose records are sent to host memory, if the backward pass is in one."""
        visit = None if self.blocks is None else self.blocks.current
        return visit if visit is not None and visit.leaves else None

    def _has_room(self, visit: Visit, more: int) -> bool:
        """Whether so many bytes may be held; the blocks to come may all have to be replayed."""
        assert self.blocks is not None and self.budget_bytes is not None
        later = self.blocks.waiting * visit.bytes
        if len(self.blocks.chosen) < self._forced:
            return False
        return self.held_bytes + later + more <= self.budget_bytes

    def _look(self, visit: Visit) -> None:
        """In a new block: what may be held follows from the memory that is in use now."""
        before, self._looked = self._looked, visit
        if visit is before:
            return
        if self.peak_bytes is not None:
            # Its activations are there; its backprops come, as many as of the block before.
            guess = visit.block.backprops_before.get(visit.shapes, 12 * visit.bytes)
            needs = guess if before is None else before.backprops
            self._transient = max(self._transient, needs)
            self._again_needs = max(self._again_needs, 0 if before is None else before.seen)
            self.budget_bytes = self._limit(visit)
            self.report.expect(in_use() + self._transient)
        # Of a block that has room as a whole, nothing need be remembered to compare a replay with.
        known = visit.block.held_before.get(visit.shapes)
        visit.stays = known is not None and self._has_room(visit, known)
        self._remember(before)

    def _remember(self, visit: Visit | None) -> None:
        if visit is None:
            return
        visit.block.remember(visit)
        if not visit.chosen:
            if len(self._held_of) >= MOST_KNOWN:
                self._held_of.clear()
            self._held_of[self._kind(visit)] = visit.held

    def settled(self) -> None:
        """The backward pass is over: what is in use beside what is held is there in each step."""
        self._remember(self._looked)
        self._looked = None
        if self.blocks is not None:
            self.blocks.over()
        if not self.looks and self._room.held < self.held_bytes:
            self.forget()
        if self.peak_bytes is not None:
            self._base = max(0, in_use() - self.held_bytes)
            self.report.expect(self._base + self.held_bytes + self._in_sum)
            if self.blocks and self.blocks.chosen:
                last = self.held_bytes - self._freed + max(0, self._grown)
                self.report.expect(self._base + last + self._in_sum + self._again_needs)
        if self.looks and self.blocks and not self.blocks.chosen and not self.host_bytes:
            growth = self.report.predicted_peak - self._begun + self._stacks
            self._room.note(self._size, growth, self.held_bytes)

    def forget(self) -> None:
        """Memory has run out: the next step is looked at."""
        self._room.forget()

    def _limit(self, visit: Visit | None = None) -> int | None:
        """Bytes that may be held, as the backward pass comes to a block."""
        if self.peak_bytes is None:
            return None if self._most is None else max(0, self._most - self._spare)
        room = self.peak_bytes - self._spare
        most = self.held_bytes + max(0, room - self._transient - in_use())
        if visit is not None and self.blocks is not None:
            most += self.blocks.waiting * visit.given  # in use already, and counted as held later
        if self._base is not None:
            # Then sums are formed of what is held, and after that of blocks that run again.
            later = max(0, self._again_needs - self._freed)
            most = min(most, max(0, room - self._base - self._in_sum - later))
        return most if self._most is None else min(most, max(0, self._most - self._spare))

    def visited(self, record: Record) -> None:
        """The norm of ``record`` is known; its layer is among those that a replay would run."""
        visit = None if self.blocks is None else self.blocks.of(record)
        if visit is not None and self.budget_bytes is not None:
            visit.seen += sum(t.nbytes for t in record.tensors)
            visit.backprops += record.backprop_bytes
            visit.names.add(record.spec.name)
            visit.owners.update(record.layer.owners[n] for n in record.spec.params)

    def stores(self, record: Record) -> bool:
        """Whether the per-sample gradients of ``record`` are stored (else it is kept)."""
        if not record.layer.rule.norm_is_local:
            return False
        choice = self._choice(record)
        what = choice.what
        budget = self.budget_bytes
        if budget is not None and self.held_bytes + choice.bytes[what] > budget:
            what = min(choice.bytes, key=choice.bytes.__getitem__)
        visit = self.blocks.of(record) if self.looks and self.blocks else None
        if visit is not None and visit.leaves:
            what = choice.what
            self.host_bytes += choice.bytes[what]
            visit.held += choice.bytes[what]
            self.report.choices[choice.layer] = replace(choice, what="offload")
            return what == "store"
        freed = choice.bytes[what] - int(self._of_element * record.spec.elements)
        self.held_bytes += choice.bytes[what]
        self._freed += freed
        if visit is not None:
            visit.held += choice.bytes[what]
            visit.freed += freed
            self.largest_block = max(self.largest_block, visit.held)
        if self.looks and what == "keep":
            self._stack(record)
        taken = choice if what == choice.what else replace(choice, what=what)
        self.report.choices[choice.layer] = taken
        return what == "store"

    def _stack(self, record: Record) -> None:
        """In a step like this that is not looked at, its norm is taken together with others."""
        use = record.activations, record.backprops
        own = record.layer.rule.stacked_bytes(record.spec, *use)
        self._stacks = max(own, self._stacks, min(self._stacks + own, STACKED_BYTES))

    def _choice(self, record: Record) -> Choice:
        tensors = record.tensors
        spec = record.spec
        key = (spec.name, spec.params, self.rounding is None, *[t.shape for t in tensors])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()  # batches of ever new sizes, as Poisson sampling draws them
            known = self._known[key] = compare(record, self.rounding is not None)
        return known
