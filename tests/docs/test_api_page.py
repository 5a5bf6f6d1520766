"""The page of the API has every public object, each with a docstring."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
# Modules whose `__all__` is what users import.
PUBLIC = (
    "opacus",
    "opacus.accountants",
    "opacus.auditing",
    "opacus.data_loader",
    "opacus.distributed_checkpoint",
    "opacus.grad_sample",
    "opacus.grad_sample.triton_kernels",
    "opacus.integrations.transformers",
    "opacus.layers",
    "opacus.optimizers",
    "opacus.schedulers",
    "opacus.utils.uniform_sampler",
    "opacus.validators",
)
WHOLE = re.compile(r"automodule:: ([\w.]+)\n(?:   :imported-members:\n)?   :members:\n")


def public(name: str) -> dict[str, object]:
    """The functions and classes that a module names in ``__all__``."""
    module = importlib.import_module(name)
    found = {each: getattr(module, each) for each in module.__all__ if not each.startswith("_")}
    return {
        each: value
        for each, value in found.items()
        if callable(value) and not isinstance(value, ModuleType)
    }


def missing(names: list[str], page: str) -> list[str]:
    """Names that no directive of the page gives."""
    return [name for name in names if not re.search(rf"\b{name}\b", page)]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_object_is_on_the_page(name: str) -> None:
    objects = public(name)
    assert objects
    if name not in WHOLE.findall(PAGE):
        assert missing(list(objects), PAGE) == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_object_says_what_it_is(name: str) -> None:
    bare = [each for each, value in public(name).items() if not inspect.getdoc(value)]
    assert bare == []


def test_what_is_left_out_is_found() -> None:
    page = PAGE.replace("DPMultiheadAttention", "")
    assert missing(list(public("opacus.layers")), page) == ["DPMultiheadAttention"]
