"""Hooks that users put on private parameters, which would see or make unclipped gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def refuse_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters with ``register_hook`` or ``register_post_accumulate_grad_hook``.

    In ghost modes autograd forms no gradient that would reach them; in the others they get the
    gradient before it is clipped, and what they return is ignored.

    Raises:
        ValueError: It names the parameters.
    """
    hooked = [
        name
        for name, parameter in parameters
        if parameter.requires_grad
        and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
    ]
    if hooked:
        raise ValueError(
            f"parameters {hooked[:5]} have hooks (register_hook or "
            "register_post_accumulate_grad_hook): these see gradients that are not clipped and "
            "have no noise, and what they change does not reach the private step. Remove them; "
            "to change or mask the released gradient, use optimizer.attach_step_hook, which runs "
            "when p.grad is private"
        )
