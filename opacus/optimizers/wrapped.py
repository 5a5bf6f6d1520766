"""What a private optimizer passes on to the optimizer that it wraps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from opacus.core.platform.delegated import Delegated


class WrappedOptimizer(Optimizer):
    """An optimizer whose parameters, state and groups are those of ``original_optimizer``."""

    original_optimizer: Optimizer

    param_groups = Delegated[list[dict[str, Any]]]("original_optimizer")
    state = Delegated[defaultdict[Tensor, Any]]("original_optimizer")
    defaults = Delegated[dict[str, Any]]("original_optimizer")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the hooks of the model do not know the new parameters.

        Raises:
            NotImplementedError: Always; it says what to do instead.
        """
        raise NotImplementedError(
            "add_param_group() on a private optimizer would train parameters that nothing clips. "
            "Add the group to the plain optimizer and call make_private again"
        )

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return repr(self.original_optimizer)
