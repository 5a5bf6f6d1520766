"""Linear layers of torchao that compute in float8: which of them keep units apart.

A float8 product has scales for what it multiplies. Rowwise, a row of the input and of the output's
gradient has a scale of its own, and all rows of a unit are its own. Tensorwise, one outlier in the
batch sets the scale, and with it the rounding, of every unit; delayed scales carry it into later
steps. No clipping bounds that. Scales of the weight see no data. The weight's gradient is formed by
our rule, from the input and the output's gradient before they are rounded, whatever the recipe.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from opacus.core.rules.linear import LinearRule


class Float8LinearRule(LinearRule):
    """A linear layer whose products are taken of rounded rows."""

    hides_rows = True


def is_float8_linear(kind: type) -> bool:
    """Whether a class is torchao's linear layer for training in float8."""
    names = ((base.__module__, base.__name__) for base in kind.__mro__)
    return any(n == "Float8Linear" and m.startswith("torchao.") for m, n in names)


def coupled_by_scales(module: nn.Module) -> str | None:
    """What is wrong with a float8 layer, ``None`` if units stay apart or it is no such layer."""
    if not is_float8_linear(type(module)):
        return None
    config: Any = module.config
    for what, cast in (
        ("input", config.cast_config_input),
        ("gradient of the output", config.cast_config_grad_output),
    ):
        kind, size = cast.scaling_type.name, cast.scaling_granularity.name
        if kind != "DISABLED" and (kind != "DYNAMIC" or size != "AXISWISE"):
            scaling = "tensorwise" if kind == "DYNAMIC" else kind.lower()
            return (
                f"its {what} is cast to float8 with {scaling} scales, so that one sample's outlier "
                "changes the rounding of all others, which no clipping bounds. Convert the model "
                "with Float8LinearConfig.from_recipe_name('rowwise_with_gw_hp')"
            )
    return None
