"""Several optimizers that take one step together, such as Muon and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class JointOptimizer(Optimizer):
    """One optimizer made of several, each with parameters of its own.

    Its parameter groups are theirs, one after the other, so schedulers and checkpoints treat it
    like any other. ``PrivacyEngine.make_private(optimizer=[...])`` makes one by itself: the
    gradients of all parameters are clipped together, get their noise and are counted once.

    Args:
        optimizers: At least one. A scheduler of one of them keeps working.

    Raises:
        ValueError: There is none, or a parameter is in two of them.

    Example::

        matrices = [p for p in model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-4)]
        model, optimizer, loader = engine.make_private(module=model, optimizer=both, ...)
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        if not self.optimizers:
            raise ValueError("there must be at least one optimizer, got an empty list")
        other = [type(o).__name__ for o in self.optimizers if not isinstance(o, Optimizer)]
        if other:
            raise ValueError(f"each must be a torch.optim.Optimizer, got {other}")
        first, *others = (o.defaults for o in self.optimizers)
        # What they agree on: OneCycleLR, say, asks here what it may change in every group.
        self.defaults = {
            name: value for name, value in first.items()
            if all(name in d and d[name] == value for d in others)
        }  # fmt: skip
        held = [id(p) for group in self.param_groups for p in group["params"]]
        if len(held) > len(set(held)):
            raise ValueError(
                f"{len(held) - len(set(held))} parameters are in two of the optimizers, which "
                "would both update them: give each parameter to one"
            )
        self.__setstate__({})  # step and state hooks of torch, which asks for groups otherwise

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, in the order of the optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """The state of each parameter, to be read."""
        return MappingProxyType({p: s for o in self.optimizers for p, s in o.state.items()})

    @property
    def noise_std(self) -> float:
        """Of the gradients' noise; setting it sets it in the optimizers that have it.

        Raises:
            AttributeError: None of them does.
        """
        for optimizer in self.optimizers:
            if hasattr(optimizer, "noise_std"):
                return float(optimizer.noise_std)
        raise AttributeError("none of the optimizers has noise_std")

    @noise_std.setter
    def noise_std(self, value: float) -> None:
        for optimizer in self.optimizers:
            if hasattr(optimizer, "noise_std"):
                optimizer.noise_std = value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Each optimizer's step; ``closure`` is called once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: it does not say whose the group is.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("add the group to one of the optimizers")

    def state_dict(self) -> dict[str, Any]:
        """In torch's format: parameters are numbered through."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        start = 0
        for optimizer in self.optimizers:
            own = optimizer.state_dict()
            state |= {start + number: value for number, value in own["state"].items()}
            for group in own["param_groups"]:
                groups.append({**group, "params": [start + number for number in group["params"]]})
            start += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave.

        Raises:
            ValueError: It is of other groups; nothing has been loaded then.
        """
        groups = list(state_dict["param_groups"])
        sizes = [len(group["params"]) for group in groups]
        here = [len(group["params"]) for group in self.param_groups]
        if sizes != here:
            raise ValueError(
                f"the state is of groups of {sizes} parameters, the optimizers have {here}"
            )
        for optimizer in self.optimizers:
            count = len(optimizer.param_groups)
            own, groups = groups[:count], groups[count:]
            numbers = {number for group in own for number in group["params"]}
            state = {n: value for n, value in state_dict["state"].items() if n in numbers}
            optimizer.load_state_dict({"state": state, "param_groups": own})

    def __getattr__(self, name: str) -> Any:
        # Only schedule-free optimizers have these two.
        if name in ("train", "eval") and "optimizers" in self.__dict__:
            methods = [getattr(o, name) for o in self.optimizers if hasattr(o, name)]
            if methods:
                return lambda *args: [method(*args) for method in methods] and None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(map(repr, self.optimizers))})"


def forget_state(optimizer: Optimizer) -> None:
    """Leave an optimizer, or each of several, as it is before its first step."""
    for own in getattr(optimizer, "optimizers", (optimizer,)):
        own.state.clear()


def joined(optimizer: Any, module: nn.Module) -> Any:
    """A list of optimizers as one; anything else as it is.

    Raises:
        ValueError: A parameter of ``module`` that is trainable is in none, or one is in two.
    """
    if not isinstance(optimizer, list | tuple):
        return optimizer
    joint = JointOptimizer(optimizer)
    held = {id(p) for group in joint.param_groups for p in group["params"]}
    missing = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"parameters {missing[:5]} are trainable and in none of the optimizers: give each "
            "parameter to one of them, or freeze it"
        )
    return joint
