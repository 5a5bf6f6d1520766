"""What is used of torch beyond its public interface has a substitute where it is missing."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opacus.core.platform import torch_internals


def test_streams_are_told_apart_without_the_internal_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream may not read what another one is still to write."""
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda i: SimpleNamespace(cuda_stream=7 + i))
    found: Any = importlib.util.spec_from_file_location("again", torch_internals.__file__)
    again = importlib.util.module_from_spec(found)
    found.loader.exec_module(again)
    assert [again.stream_number(device) for device in (0, 1)] == [7, 8]
