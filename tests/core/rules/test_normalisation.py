"""Normalisation layers: default eps, the classes of Hugging Face, lookalikes."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from opacus.core.rules import HUGGING_FACE_RMS_NORMS, rule_for
from opacus.core.rules.generic import GenericRule
from opacus.core.rules.normalisation import HuggingFaceRMSNormRule
from tests.core.rules.cases import norm_sq, observe
from tests.helpers.oracle import relative_error

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rms_norm_has_the_default_eps_that_torch_computes_with(dtype: torch.dtype) -> None:
    layer = nn.RMSNorm(8).to(dtype)
    x = (torch.randn(3, 5, 8) * 1e-3).to(dtype)
    g = torch.randn(3, 5, 8).to(dtype)
    want = torch.stack([torch.autograd.grad(layer(x[i]), layer.weight, g[i])[0] for i in range(3)])
    seen = observe(layer, x, dtype)
    got = seen.rule.per_sample_grad(seen.spec, (x,), g)["weight"]
    assert relative_error(got, want) <= (1e-5 if dtype == torch.float32 else 2e-2)


def rms_norm_classes(names: frozenset[str]) -> dict[str, type[nn.Module]]:
    """Classes of the installed transformers, by name."""
    found = {}
    folder = Path(transformers.__file__).parent / "models"
    for family in pkgutil.iter_modules([str(folder)]):
        for path in sorted((folder / family.name).glob("modeling_*.py")):
            wanted = [n for n in names - found.keys() if f"class {n}(" in path.read_text()]
            if wanted:
                module = f"transformers.models.{family.name}.{path.stem}"
                source = importlib.import_module(module)
                found.update({n: getattr(source, n) for n in wanted})
    return found


def check_class(kind: type[nn.Module]) -> None:
    layer = kind(8).double()
    nn.init.uniform_(layer.weight)
    assert isinstance(rule_for(layer), HuggingFaceRMSNormRule)
    # Small inputs, so that eps matters.
    seen = observe(layer, torch.randn(3, 5, 8) * 3e-3)
    got = seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)["weight"]
    # Some of them compute in fp32 whatever they are given.
    assert relative_error(got, norm_sq(seen.want["weight"])) <= 1e-5


def test_rms_norms_of_common_families() -> None:
    families = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma3", "Phi3", "Olmo2")
    names = frozenset(f"{family}RMSNorm" for family in families)
    classes = rms_norm_classes(names)
    assert classes.keys() == names <= HUGGING_FACE_RMS_NORMS
    for kind in classes.values():
        check_class(kind)


@pytest.mark.slow
def test_every_listed_rms_norm() -> None:
    classes = rms_norm_classes(HUGGING_FACE_RMS_NORMS)
    assert len(classes) > len(HUGGING_FACE_RMS_NORMS) // 2
    for kind in classes.values():
        check_class(kind)


def test_a_class_of_the_same_name_from_elsewhere_is_not_trusted() -> None:
    class LlamaRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.square()

    assert isinstance(rule_for(LlamaRMSNorm()), GenericRule)


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)], ids=str)
def test_an_input_without_batch_is_named(layer: nn.Module) -> None:
    seen = observe(layer, torch.randn(3, 4, 5))
    with pytest.raises(ValueError, match=rf"net\.layer.*{type(layer).__name__}.*\[4, 5\]"):
        seen.rule.norm_sq(seen.spec, (torch.randn(4, 5),), torch.randn(4, 5))
