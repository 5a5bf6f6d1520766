"""Layers under tensor parallelism: the ranks hold parts of the same samples' gradients.

With activations and backprops as DTensors their placements say which part of a linear
layer's gradient is here: the norm of that part is summed over the mesh. Any other layer
is computed whole on every rank, so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.platform.held import HeldModule
from opacus.core.platform.sharded import is_dtensor
from opacus.core.rules.base import LayerRule, Use
from opacus.core.rules.linear import LinearRule
from opacus.core.rules.spec import LayerSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class TensorParallelRule(LayerRule):
    """Another rule, for inputs that may be DTensors on one tensor-parallel mesh axis.

    Args:
        rule: The rule of the layer.
        module: The layer; read for where its parameters are, not for their values.
    """

    def __init__(self, rule: LayerRule, module: nn.Module) -> None:
        self.rule = rule
        self.module = HeldModule(module)
        self.needs_parameters = rule.needs_parameters
        self.norm_is_local = False

    def options(self, module: nn.Module) -> dict[str, Any]:
        return self.rule.options(module)

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        return self.rule.per_sample_grad(spec, *_whole(activations, backprops))

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        sharded = self._sharded_dim(activations, backprops)
        if sharded is None:
            return self.rule.norm_sq(spec, *_whole(activations, backprops))
        norms = self.rule.norm_sq(spec, *_local(activations, backprops))
        for name, value in norms.items():
            # The bias of a layer whose input is split is the same on every rank.
            if name == "weight" or sharded == 0:
                dist.all_reduce(value, group=backprops.device_mesh.get_group())
        return norms

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        sharded = self._sharded_dim(activations, backprops)
        if sharded is None:
            grads = self.rule.weighted_grad(spec, *_whole(activations, backprops), factors)
            return {name: self._like_parameter(name, grad) for name, grad in grads.items()}
        grads = self.rule.weighted_grad(spec, *_local(activations, backprops), factors)
        return {n: self._as_parameter(n, g, backprops, sharded) for n, g in grads.items()}

    def by_rows(self, activations: Any, batch: int) -> bool:
        return self.rule.by_rows(activations, batch)

    def join(self, spec: LayerSpec, uses: Sequence[Use]) -> Use | None:
        return self.rule.join(spec, [_whole(*use) for use in uses])

    def _sharded_dim(self, activations: Any, backprops: Any) -> int | None:
        """0 if this rank has some outputs' rows of the weight, 1 if some inputs' columns."""
        if not isinstance(self.rule, LinearRule) or not is_dtensor(backprops):
            return None
        from torch.distributed.tensor import Replicate, Shard

        x = activations[0]
        if not is_dtensor(x) or backprops.device_mesh.ndim != 1:
            return None
        places = (x.placements[0], backprops.placements[0])
        last = (Shard(x.dim() - 1), Shard(backprops.dim() - 1))
        if places == (Replicate(), last[1]):
            return 0
        return 1 if places == (last[0], Replicate()) else None

    def _as_parameter(self, name: str, grad: Tensor, like: DTensor, sharded: int) -> Tensor:
        """Wrap this rank's part of a gradient as the DTensor that the parameter is."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        parameter = self.module()._parameters[name]
        if not is_dtensor(parameter):
            return grad
        split = name == "weight" or sharded == 0
        place = Shard(sharded if name == "weight" else 0) if split else Replicate()
        whole = DTensor.from_local(
            grad,
            like.device_mesh,
            [place],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return whole.redistribute(placements=parameter.placements)

    def _like_parameter(self, name: str, grad: Tensor) -> Tensor:
        """Give a whole gradient the placement of the parameter."""
        from torch.distributed.tensor import DTensor, Replicate

        parameter = self.module()._parameters[name]
        if not is_dtensor(parameter):
            return grad
        mesh = parameter.device_mesh
        whole = DTensor.from_local(grad, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=parameter.placements)


def _whole(activations: Any, backprops: Any) -> tuple[Any, Any]:
    if not isinstance(activations, tuple):
        return activations, _full(backprops)
    return tuple(_full(a) for a in activations), _full(backprops)


def _local(activations: tuple[DTensor, ...], backprops: DTensor) -> tuple[Any, Any]:
    return tuple(a.to_local() for a in activations), backprops.to_local()


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
