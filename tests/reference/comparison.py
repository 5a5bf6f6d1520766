"""Compares nested results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def assert_same(ours: Any, theirs: Any, *, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Equal up to rounding: the same keys, lengths, types and shapes, numbers within bounds."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same(ours[key], theirs[key], rtol=rtol, atol=atol)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b, rtol=rtol, atol=atol)
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=rtol, abs=atol)
    else:
        assert ours == theirs


def same(ours: Any, theirs: Any, **bounds: float) -> bool:
    """Whether :func:`assert_same` passes."""
    try:
        assert_same(ours, theirs, **bounds)
    except AssertionError:
        return False
    return True
