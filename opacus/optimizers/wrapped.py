"""What a private optimizer passes on to the optimizer that it wraps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.core.platform.delegated import Delegated
from opacus.optimizers.step_guard import let_go


class WrappedOptimizer(Optimizer):
    """An optimizer whose parameters, state and groups are those of ``original_optimizer``."""

    original_optimizer: Optimizer
    params: list[nn.Parameter]
    listed: list[nn.Parameter] | None  # while a private step runs
    _resumed = False  # a state of steps was loaded since the latest step

    @property
    def unreleased(self) -> list[nn.Parameter]:
        """Parameters whose ``p.grad`` is of private samples, and has no noise yet."""
        raise NotImplementedError

    def let_go(self) -> None:
        """See :func:`opacus.optimizers.step_guard.let_go`."""
        let_go(self)

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
        """Load the state of the wrapped optimizer; what its steps have spent is not in it."""
        self.original_optimizer.load_state_dict(state_dict)
        self._resumed = bool(state_dict.get("state"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused, so that copies and pickles are: they would draw noise of their own, uncounted.

        Raises:
            TypeError: Always; it says what to do instead.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its noise and batches are "
            "those of one run. Save state_dict(), or the run with the engine's save_checkpoint(), "
            "and call make_private for another one"
        )

    def __repr__(self) -> str:
        return repr(self.original_optimizer)
