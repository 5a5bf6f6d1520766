"""Any module at all: its per-sample gradients by running it again under vmap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus.core.rules.base import LayerRule, scale_rows
from opacus.core.spec import LayerSpec


@dataclass(frozen=True)
class Call:
    """One call of a module: what it was given, and its own tensors at that time.

    Tensors among the arguments are batch first; ``batch_dim`` is where the module wants
    the batch.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    batch_dim: int = 0


class GenericRule(LayerRule):
    """Runs ``module`` once more for each sample, as a batch of one.

    Only parameters that the module owns directly are differentiated; those of its
    children belong to their own rules. Tensor arguments with B rows are split into
    samples, all others are given to every sample whole.

    Args:
        module: The module; its hooks must not record while the rule runs it.
    """

    needs_parameters = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def per_sample_grad(
        self, spec: LayerSpec, activations: Call, backprops: Any
    ) -> dict[str, Tensor]:
        outputs = backprops if isinstance(backprops, tuple) else (backprops,)
        batch = outputs[0].shape[0]
        own = {name: activations.parameters[name] for name in spec.params}
        if batch == 0:
            return {name: p.new_zeros(0, *p.shape) for name, p in own.items()}
        leaves, tree = tree_flatten((activations.args, dict(activations.kwargs)))
        split = [i for i, leaf in enumerate(leaves) if _has_rows(leaf, batch)]
        if not split and not all(_has_rows(leaf, 1) for leaf in leaves if isinstance(leaf, Tensor)):
            raise ValueError(
                f"{spec} was called without any input that has the {batch} samples of the batch "
                "in its first dimension, so its per-sample gradients are unknown; freeze it, or "
                "let it take the batch"
            )

        def one_sample(inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
            filled = list(leaves)
            for i, tensor in zip(split, inputs, strict=True):
                filled[i] = _as_batch(tensor, activations.batch_dim)
            args, kwargs = tree_unflatten(filled, tree)
            run = self._runner(activations, args, kwargs)
            batches = tuple(_as_batch(g, activations.batch_dim) for g in grads)
            return self._pull_back(spec, run, own, batches)

        inputs = tuple(leaves[i] for i in split)
        with self._precision(own, inputs):
            try:
                mapped = vmap(one_sample, randomness="different")
                return mapped(inputs, outputs)  # type: ignore[no-any-return]
            except (RuntimeError, ValueError, NotImplementedError):
                # Not every module can be mapped (control flow on values, in-place tricks).
                return _stack(
                    [
                        one_sample(tuple(t[i] for t in inputs), tuple(g[i] for g in outputs))
                        for i in range(batch)
                    ]
                )

    def weighted_grad(
        self, spec: LayerSpec, activations: Call, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        own = {name: activations.parameters[name] for name in spec.params}
        scaled = scale_rows(backprops, factors)
        grads = scaled if isinstance(scaled, tuple) else (scaled,)
        run = self._runner(activations, activations.args, activations.kwargs)
        return self._pull_back(spec, run, own, grads)

    def _runner(
        self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[dict[str, Tensor]], tuple[Tensor, ...]]:
        constant = {n: p.detach() for n, p in self.module.named_parameters()}
        constant |= {**call.parameters, **call.buffers}

        def run(parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
            tensors = {**constant, **parameters}
            output = functional_call(self.module, tensors, args, dict(kwargs))
            flat, _ = tree_flatten(output)
            return tuple(t for t in flat if isinstance(t, Tensor) and t.is_floating_point())

        return run

    def _pull_back(
        self,
        spec: LayerSpec,
        run: Callable[[dict[str, Tensor]], tuple[Tensor, ...]],
        parameters: dict[str, Tensor],
        grads: tuple[Tensor, ...],
    ) -> dict[str, Tensor]:
        outputs, pull_back = vjp(run, parameters)  # type: ignore[misc]
        fitting = tuple(g.reshape(o.shape).to(o.dtype) for g, o in zip(grads, outputs, strict=True))
        return pull_back(fitting)[0]  # type: ignore[no-any-return]

    def _precision(
        self, parameters: dict[str, Tensor], inputs: tuple[Tensor, ...]
    ) -> AbstractContextManager[Any]:
        """Autocast again, if the layer ran under it."""
        low = {t.dtype for t in inputs if t.dtype in (torch.float16, torch.bfloat16)}
        wide = any(p.dtype == torch.float32 for p in parameters.values())
        if len(low) == 1 and wide:
            return torch.autocast(inputs[0].device.type, dtype=low.pop())
        return nullcontext()


def _as_batch(sample: Tensor, dim: int) -> Tensor:
    """One sample as a batch of one."""
    return sample.unsqueeze(min(dim, sample.dim()))


def _has_rows(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch


def _stack(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
