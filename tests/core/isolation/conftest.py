"""Fixtures of the tests of the isolation check."""

from __future__ import annotations

from typing import Any

import pytest

from opacus.core.isolation.probe import Probe


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step of each comparison that is made, in order."""
    made: list[int] = []
    run = Probe.run

    def counted(self: Probe, *args: Any) -> Any:
        made.append(1)
        return run(self, *args)

    monkeypatch.setattr(Probe, "run", counted)
    return made


@pytest.fixture
def unfollowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trail of rows says nothing: what is found is found by running units alone."""
    monkeypatch.setattr("opacus.core.record.whose.can_follow", lambda *a: False)
