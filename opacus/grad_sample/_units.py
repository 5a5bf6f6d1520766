"""Units that the model's arguments name."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from opacus.core.privacy.unit_names import UnitNames
from opacus.core.ranks.mesh import ranks_of
from opacus.core.record.named import DOCUMENTS, gives_units, named_units, other_inputs, take_units
from opacus.core.step.auto import ChosenMode
from opacus.grad_sample._opacus_names import OpacusNames


class NamedByUser(OpacusNames):
    """The hooks' record of what the user has named: units, and the mode.

    Attributes:
        auto_choice: The choice of ``grad_sample_mode="auto"``, if that was requested.
        privacy_unit: Argument of the model that says whose each row is; ``None``: row i is
            sample i.
    """

    _ranks_share_a_step = _ranks_differ = False
    auto_choice: ChosenMode | None = None
    privacy_unit: str | None = None

    def explain(self) -> str:
        """Which mode ``grad_sample_mode="auto"`` has chosen, and why.

        Raises:
            RuntimeError: Another mode was asked for: there is nothing to explain.
        """
        if self.auto_choice is None:
            raise RuntimeError(
                "there is a plan in the *_bk modes only, for each step that was run, and a choice "
                "to explain with grad_sample_mode='auto'"
            )
        return str(self.auto_choice)

    def name_units_by(self, privacy_unit: str, *, ranks: bool, ranks_differ: bool) -> None:
        """The model's argument of this name says whose each row is.

        Of a unit that keeps its name all rows are clipped together, so they are in one batch.

        Args:
            privacy_unit: The name.
            ranks: Whether other ranks take part in each step.
            ranks_differ: Whether they have other rows.
        """
        self._ranks_share_a_step, self._ranks_differ = ranks, ranks_differ
        self.privacy_unit = privacy_unit
        if privacy_unit not in DOCUMENTS:
            self._unit_names = UnitNames()
            self.forbid_grad_accumulation()

    def _name_units(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Take the names of units from the model's arguments, if there are any."""
        key, recorder = self.privacy_unit, self._recorder
        # Where the model is checked on the side, rows are compared.
        trains = key is not None and recorder.active(self._module) and not recorder.probed
        if key is None or not (trains or gives_units(key, args, kwargs)):
            return args, kwargs  # in evaluation nobody's units matter
        recorder.passes.name_units(None)
        try:
            args, kwargs, value = take_units(key, args, kwargs)
            named = named_units(key, value, other_inputs(key, args, kwargs)) if trains else None
        except ValueError as error:
            if trains:
                with suppress(RuntimeError):  # its own says more here
                    self._refuse_together(key, str(error))
            raise
        if named is not None:
            self._refuse_together(key, "")
        if named is not None and self._unit_names is not None:
            everyone = self._of_all_ranks(key, named.names)
            named = replace(named, note=partial(self._unit_names.note, everyone))
        recorder.passes.name_units(named)
        return args, kwargs

    def _refuse_together(self, key: str, refusal: str) -> None:
        """Let no rank wait in the model for one that refuses its batch.

        Args:
            key: The argument that names units.
            refusal: Why this rank refuses; empty if it does not.

        Raises:
            RuntimeError: On all ranks: one does.
        """
        if not self._ranks_share_a_step:
            return
        ranks = ranks_of(self._module)
        own = f"rank {dist.get_rank()}: {refusal}\n" if refusal else ""
        if said := ranks.gather_text(own).strip():
            raise RuntimeError(f"{key} was refused on another rank. {said}")

    def _of_all_ranks(self, key: str, names: Tensor) -> Tensor:
        """The units whose rows any rank has.

        Args:
            key: The argument that names them.
            names: Those of this rank.

        Raises:
            ValueError: On all ranks: several have rows of a unit, of which each would clip its own
                part.
        """
        if not self._ranks_differ:
            return names
        ranks = ranks_of(self._module)
        everyone = ranks.gather_rows(names, all_copies=True)
        units, counts = everyone.unique(return_counts=True)
        if twice := units[counts != ranks.copies].tolist():
            raise ValueError(
                f"{key}: several ranks have rows of the units {twice[:5]}, of which each would "
                "clip its own part only: let all rows of a unit be on one rank"
            )
        return everyone
