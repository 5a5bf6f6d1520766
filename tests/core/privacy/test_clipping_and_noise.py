"""Clip rules, privacy parameters and noise by themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from opacus.core.privacy import noise as noises
from opacus.core.privacy.clipping import clip_each, clip_flat
from opacus.core.privacy.key import RunKey
from opacus.core.privacy.noise import gaussian
from opacus.core.privacy.params import PrivacyParams


@pytest.mark.parametrize("clip", [1e-3, 1.0, 7.5])
def test_clipped_norm_is_at_most_c(clip: float) -> None:
    norms = torch.cat([torch.logspace(-6, 6, 50), torch.tensor([0.0])])
    clipped = clip_flat(norms, clip)
    assert (clipped.factors * norms <= clip * (1 + 1e-6)).all()
    assert (clipped.factors[norms < 0.99 * clip] == 1).all()
    assert (norms > clip).any() and not clipped.excluded.any()


def test_norms_that_are_not_finite_are_excluded() -> None:
    clipped = clip_flat(torch.tensor([1.0, math.nan, math.inf]), 2.0)
    assert clipped.excluded.tolist() == [False, True, True]
    assert clipped.factors.tolist() == [1.0, 0.0, 0.0]
    assert clip_flat(torch.zeros(0), 1.0).factors.shape == (0,)


def test_per_layer_clipping_excludes_a_sample_everywhere() -> None:
    norms = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([1.0, math.nan])}
    clipped = clip_each(norms, {"a": 1.0, "b": 0.5})
    assert clipped.excluded.tolist() == [False, True]
    factors = {name: clipped.of(name) for name in norms}
    assert clipped.of("unused").tolist() == [0.0, 0.0]
    assert factors["a"][1] == 0 and factors["b"][1] == 0
    assert factors["a"][0] * 3 <= 1 and factors["b"][0] <= 0.5


def test_one_home_of_c() -> None:
    params = PrivacyParams(noise_multiplier=2.0, max_grad_norm=[3.0, 4.0], loss_reduction="sum")
    assert params.sensitivity == 5.0 and params.noise_std == 10.0
    params.max_grad_norm = 10.0  # a scheduler's single number scales all layers
    assert params.max_grad_norms == [6.0, 8.0] and params.noise_std == 20.0
    with pytest.raises(ValueError, match="max_grad_norm"):
        params.max_grad_norm = [1.0, -1.0]
    assert params.max_grad_norms == [6.0, 8.0]


@pytest.mark.parametrize("given", [np.array([3.0, 4.0]), torch.tensor([3, 4]), (3, 4)])
def test_norms_in_an_array(given: Any) -> None:
    params = PrivacyParams(noise_multiplier=1.0, max_grad_norm=given, loss_reduction="sum")
    assert params.max_grad_norms == [3.0, 4.0] and params.noise_std == 5.0
    params.max_grad_norm = torch.tensor(10.0)
    assert params.max_grad_norms == [6.0, 8.0] and type(params.max_grad_norm) is float
    for wrong in (torch.ones(2, 2), {"a": 1.0}, [None]):
        with pytest.raises(TypeError, match="max_grad_norm must be a number, or a list of numbers"):
            params.max_grad_norm = wrong


def test_count_shares_the_budget() -> None:
    params = PrivacyParams(noise_multiplier=1.0, max_grad_norm=1.0, loss_reduction="sum")
    params.count_noise_std = 2.0
    # Two Gaussian mechanisms compose as one with 1/sigma^2 = sum of theirs.
    assert params.noise_std**-2 + (2 * 2.0) ** -2 == pytest.approx(1.0)


@pytest.mark.parametrize("secure", [False, True])
def test_gaussian_has_the_right_distribution(secure: bool) -> None:
    noise = gaussian(3.0, torch.zeros(200, 500), secure_mode=secure).double()
    count = noise.numel()  # bounds of seven standard errors: the key is the operating system's
    assert abs(noise.mean()) < 7 * 3.0 / math.sqrt(count)
    assert noise.std().item() == pytest.approx(3.0, rel=7 / math.sqrt(2 * count))
    kurtosis = ((noise / noise.std()) ** 4).mean().item()
    assert kurtosis == pytest.approx(3.0, abs=7 * math.sqrt(24 / count))
    again = gaussian(3.0, torch.zeros(200, 500), secure_mode=secure)
    assert not torch.equal(noise.float(), again)


def test_gaussian_widens_half_precision_and_draws_nothing_for_zero() -> None:
    assert gaussian(1.0, torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.float32
    state = torch.get_rng_state()
    assert gaussian(0.0, torch.zeros(3)).abs().sum() == 0
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("size", [0, -4, math.nan, math.inf])
def test_a_mean_is_divided_by_a_positive_size(size: float) -> None:
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    with pytest.raises(ValueError, match="expected_batch_size must be > 0"):
        PrivacyParams(**given, expected_batch_size=size)
    later = PrivacyParams(**given, expected_batch_size=4)
    with pytest.raises(ValueError, match="expected_batch_size must be > 0"):
        later.expected_batch_size = size
    assert later.expected_batch_size == 4


def test_noise_of_a_tensor_that_waits_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard on the CPU gets its noise where it is computed with: the same noise, in its place."""
    results = []
    elsewhere, original = torch.device("cpu", 0), noises.add_gaussian
    assert elsewhere != torch.zeros(1).device
    for device in (torch.device("cpu"), elsewhere):
        seen = []
        monkeypatch.setattr(
            noises, "compute_devices", lambda tensors, to=device: [to] * len(tensors)
        )
        key = RunKey(torch.Generator().manual_seed(3))
        sums = [torch.full((5, 7), 2.0), torch.ones(11)]
        targets = [sums[0], torch.empty(11, dtype=torch.bfloat16)]
        monkeypatch.setattr(
            noises,
            "add_gaussian",
            lambda std, draws, *a, seen=seen: seen.append(draws) or original(std, draws, *a),
        )
        noises.add_noise(1.5, list(zip(sums, targets, ("a", "b"), strict=True)), key, "noise")
        results.append((targets, sum(map(bool, seen))))
    (one, pieces), (other, pieces_elsewhere) = results
    assert (pieces, pieces_elsewhere) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert float((one[0] - 2.0).std()) > 0.5
