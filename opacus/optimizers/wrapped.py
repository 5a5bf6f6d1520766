"""What a private optimizer passes on to the optimizer that it wraps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakMethod

from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.core.platform.delegated import Delegated
from opacus.core.platform.sharded import local_of
from opacus.core.privacy.gradients import unprocessed

_GUARD = "_opacus_guard"  # of a plain optimizer: what takes its guard off


class WrappedOptimizer(Optimizer):
    """An optimizer whose parameters, state and groups are those of ``original_optimizer``."""

    original_optimizer: Optimizer
    params: list[nn.Parameter]
    _listed: list[nn.Parameter] | None  # while a private step runs
    _resumed = False  # a state of steps was loaded since the latest step

    def _guard_original(self) -> None:
        """Refuse steps that the plain optimizer takes by itself, with gradients without noise.

        A variable that still holds it is stepped easily; nothing would be clipped or counted.
        """
        guarded = WeakMethod(self._refuse_alone)

        def guard(*_: Any) -> None:
            refuse = guarded()
            if refuse is not None:
                refuse()

        for plain in getattr(self.original_optimizer, "optimizers", (self.original_optimizer,)):
            if not hasattr(plain, "register_step_pre_hook"):
                continue
            if hasattr(plain, _GUARD):  # of another private optimizer, whose place this one takes
                getattr(plain, _GUARD).remove()
            setattr(plain, _GUARD, plain.register_step_pre_hook(guard))

    def _refuse_alone(self) -> None:
        """What the private step has released is marked; other gradients are not private."""
        if self._listed is not None:  # it is the private step; gradients may share memory
            return
        fresh = unprocessed([parameter.grad for parameter in self.params])
        # torch.distributed.checkpoint steps with zeros, to make a state.
        if any(grad is not None and bool((local_of(grad) != 0).any()) for grad in fresh):
            raise RuntimeError(
                "step() of the plain optimizer was called with gradients that are not private: "
                "nothing would be clipped, noised or counted. Call step() of the optimizer that "
                "make_private returned; for steps on public data, build another optimizer"
            )

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
