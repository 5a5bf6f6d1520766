"""The section of a model card says what the run was."""

from __future__ import annotations

import pytest

from opacus.integrations.transformers.card import Guarantee


@pytest.mark.parametrize("poisson", [True, False])
def test_without_poisson_sampling_nothing_is_called_private(poisson: bool) -> None:
    text = Guarantee(
        epsilon=8.0,
        delta=1e-3,
        steps=3,
        examples=64,
        expected_batch=4,
        sigma=0.4,
        clipping_norm=1.0,
        unit="example",
        mode="ghost_bk",
        accountant="prv",
        poisson=poisson,
        seeded=False,
        norms_logged=False,
    ).text()
    assert ("The weights are (8, 0.001)-differentially private" in text) == poisson
    assert ("are **not proven** to be (8, 0.001)-differentially private" in text) != poisson
