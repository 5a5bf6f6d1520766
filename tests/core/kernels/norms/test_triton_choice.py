"""The choice between the reference and the kernels, and the public entry functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from opacus.core.kernels.norms import choice, clock
from opacus.grad_sample import triton_kernels
from tests.core.kernels.triton_cases import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    draw,
    draw_mask,
    product_definition,
)

# Everything here also holds where no kernel runs.
RUNS = ON_GPU or INTERPRETED
KINDS = ["all", "bool", "weights"]


@pytest.fixture(autouse=True)
def _measure_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    choice.forget()


def close(got: torch.Tensor, want: torch.Tensor, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0)


def test_availability_is_what_the_machine_has() -> None:
    assert triton_kernels.is_triton_available() == RUNS
    assert not choice.is_usable(draw(2, 2).double())
    assert choice.is_usable(draw(2, 2)) == RUNS


@pytest.mark.parametrize("mask", KINDS)
@pytest.mark.parametrize("algorithm", [None, "width", "input_length"])
@pytest.mark.parametrize("tokens", [(), (5,), (2, 3), (2, 1, 3)], ids=str)
def test_linear_with_any_number_of_token_dimensions(mask, algorithm, tokens) -> None:
    if algorithm is not None and not RUNS:
        pytest.skip("no kernel runs here")
    a, g = draw(3, *tokens, 8), draw(3, *tokens, 4)
    flat_a, flat_g = a.reshape(3, -1, 8), g.reshape(3, -1, 4)
    m = draw_mask(mask, 3, flat_a.shape[1])
    own = None if m is None else m.reshape(3, *tokens)
    got = triton_kernels.compute_linear_norm_sq(a, g, algorithm=algorithm, mask=own)
    close(got, product_definition(flat_a, flat_g, m))


def test_several_layers_with_one_input() -> None:
    a, gs = draw(2, 5, 8), [draw(2, 5, 4), draw(2, 5, 6)]
    got = triton_kernels.compute_linear_norm_sq(a, gs)
    for value, g in zip(got, gs, strict=True):
        close(value, product_definition(a, g))


@pytest.mark.parametrize("algorithm", [None, "width", "input_length"])
def test_grouped(algorithm) -> None:
    if algorithm is not None and not RUNS:
        pytest.skip("no kernel runs here")
    pairs = [(draw(2, 5, 8), draw(2, 5, 4)), (draw(3, 2, 2, 6), draw(3, 2, 2, 5))]
    masks = [torch.rand(2, 5) > 0.5, torch.rand(3, 2, 2) > 0.5]
    masks = [m.to(DEVICE) for m in masks]
    got = triton_kernels.compute_grouped_linear_norm_sq(pairs, algorithm=algorithm, masks=masks)
    for value, (a, g), m in zip(got, pairs, masks, strict=True):
        a, g, m = a.flatten(1, -2), g.flatten(1, -2), m.flatten(1)
        close(value, product_definition(a, g, m))


@pytest.mark.parametrize("mask", KINDS)
def test_other_layers(mask) -> None:
    x, g = draw(2, 3, 4, 8), draw(2, 3, 4, 8)
    m = draw_mask(mask, 2, 12)
    own = None if m is None else m.view(2, 3, 4)
    w = torch.ones(2, 3, 4, device=DEVICE) if m is None else m.view(2, 3, 4).float()
    grad = (g * w[..., None]).double().flatten(1, 2)
    close(triton_kernels.compute_bias_norm_sq(g, mask=own), grad.sum(1).square().sum(1))
    x_hat = torch.nn.functional.layer_norm(x.double(), (8,), eps=1e-3).flatten(1, 2)
    weight, bias = triton_kernels.compute_normalisation_norm_sq(
        x, g, eps=1e-3, centre=True, bias=True, mask=own
    )
    close(weight, (grad * x_hat).sum(1).square().sum(1))
    close(bias, grad.sum(1).square().sum(1))
    ids = torch.randint(0, 5, (2, 3, 4), device=DEVICE)
    table = torch.nn.functional.one_hot(ids.flatten(1), 5).double()
    table[..., 2] = 0
    close(
        triton_kernels.compute_embedding_norm_sq(ids, g, padding_idx=2, mask=own),
        (table.transpose(1, 2) @ grad).square().sum((1, 2)),
    )


def test_fp64_goes_to_the_reference() -> None:
    a, g = draw(2, 5, 8).double(), draw(2, 5, 4).double()
    got = triton_kernels.compute_linear_norm_sq(a, g)
    assert got.dtype == torch.float64
    close(got, product_definition(a, g), 1e-12)
    with pytest.raises(RuntimeError, match="float64"):
        triton_kernels.compute_linear_norm_sq(a, g, algorithm="width")


def test_refusals() -> None:
    a = draw(2, 3, 4)
    for wrong in ("gram", "Width", ""):
        with pytest.raises(ValueError, match="algorithm must be one of"):
            triton_kernels.compute_linear_norm_sq(a, a, algorithm=wrong)
        with pytest.raises(ValueError, match="algorithm must be one of"):
            triton_kernels.compute_grouped_linear_norm_sq([(a, a)], algorithm=wrong)
    with pytest.raises(ValueError, match="must agree"):
        triton_kernels.compute_linear_norm_sq(a, draw(2, 4, 4))
    with pytest.raises(ValueError, match="mask must have shape"):
        triton_kernels.compute_linear_norm_sq(a, a, mask=torch.ones(2, 4, device=DEVICE))


@pytest.mark.skipif(RUNS, reason="kernels run here")
def test_naming_an_algorithm_without_a_gpu_is_refused() -> None:
    a = draw(2, 3, 4)
    with pytest.raises(RuntimeError, match="algorithm=None"):
        triton_kernels.compute_linear_norm_sq(a, a, algorithm="width")


def test_sizes_that_agree_in_three_bits_share_a_measurement() -> None:
    assert [clock._leading_bits(n) for n in (0, 1, 7, 8, 9, 11, 4096, 4607, 5120)] == [
        0, 1, 7, 8, 8, 10, 4096, 4096, 5120,
    ]  # fmt: skip


def fake_clock(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> list[str]:
    """Pretends that each way costs what ``times`` says; lists what was measured."""
    measured: list[str] = []

    def measure(ways):
        measured.extend(ways)
        return {name: times[name] for name in ways}

    monkeypatch.setattr(clock, "_measure", measure)
    monkeypatch.setattr(clock, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return measured


def test_the_fastest_way_is_measured_once_and_kept(monkeypatch) -> None:
    measured = fake_clock(monkeypatch, {"a": 2.0, "b": 1.0})
    ways = {"a": lambda: "from a", "b": lambda: "from b"}
    assert [clock.fastest("k", ways) for _ in range(3)] == ["from b"] * 3
    assert measured == ["a", "b"]
    clock.fastest("other", ways)
    assert measured == ["a", "b"] * 2


def test_measurements_are_kept_in_a_file(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(clock.CACHE_VARIABLE, "kernels.json")
    measured = fake_clock(monkeypatch, {"a": 2.0, "b": 1.0})
    ways = {"a": lambda: "from a", "b": lambda: "from b"}
    clock.fastest("k", ways)
    file = tmp_path / ".cache" / "opacus" / "kernels.json"
    assert json.loads(file.read_text()) == {"k": {"a": 2.0, "b": 1.0}}
    choice.forget()
    assert clock.fastest("k", ways) == "from b"
    assert measured == ["a", "b"]
    file.write_text("{ half written")
    choice.forget()
    assert clock.fastest("k", ways) == "from b"
    assert measured == ["a", "b"] * 2


def test_no_file_unless_it_is_named(monkeypatch, tmp_path) -> None:
    fake_clock(monkeypatch, {"a": 1.0})
    clock.fastest("k", {"a": lambda: 0})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not RUNS, reason="no kernel runs here")
@pytest.mark.parametrize("fastest", ["width", "input_length", "reference"])
def test_what_was_chosen_is_remembered_for_tensors_alike(monkeypatch, fastest) -> None:
    monkeypatch.setattr(
        clock, "_measure", lambda ways: {n: float(not n.startswith(fastest)) for n in ways}
    )
    monkeypatch.setattr(clock, "interpreted", lambda: False)
    monkeypatch.setattr(choice, "is_usable", lambda *tensors: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked, real = [], clock.fastest
    monkeypatch.setattr(choice, "fastest", lambda *given: asked.append(1) or real(*given))
    half = torch.bfloat16
    flat = draw(2 * 16 * 32 + 8, dtype=half)
    cases = {
        "aligned": lambda: (draw(2, 16, 32, dtype=half), draw(2, 16, 16, dtype=half), None),
        "misaligned": lambda: (flat[1:1025].view(2, 16, 32), draw(2, 16, 16, dtype=half), None),
        "strided": lambda: (draw(2, 32, 16, dtype=half).mT, draw(2, 16, 16, dtype=half), None),
        "two dtypes": lambda: (draw(2, 16, 32, dtype=half), draw(2, 16, 16), None),
        "wide": lambda: (draw(2, 16, 32), draw(2, 16, 16), None),
        "empty": lambda: (draw(2, 0, 32, dtype=half), draw(2, 0, 16, dtype=half), None),
        "masked": lambda: (*cases["aligned"]()[:2], torch.rand(2, 16, device=DEVICE)),
        "bool": lambda: (*cases["aligned"]()[:2], torch.rand(2, 16, device=DEVICE) > 0.5),
    }
    for turn in range(3):
        for name, case in cases.items():
            a, g, mask = case()
            asked.clear()
            got = choice.product_norm_sq(a, g, mask)
            assert bool(asked) == (turn == 0), name
            close(got, product_definition(a, g, mask), 1e-4)


@pytest.mark.skipif(not RUNS, reason="no kernel runs here")
@pytest.mark.parametrize("fastest", ["input_length", "separate", "reference"])
def test_layers_of_one_input_take_what_is_fastest(monkeypatch, fastest) -> None:
    tried: list[set[str]] = []

    def measure(ways: clock.Ways[object]) -> dict[str, float]:
        tried.append({name.split()[0] for name in ways})
        return {name: float(not name.startswith(fastest)) for name in ways}

    monkeypatch.setattr(clock, "_measure", measure)
    monkeypatch.setattr(clock, "interpreted", lambda: False)
    monkeypatch.setattr(choice, "is_usable", lambda *tensors: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    half = torch.bfloat16
    a, gs = draw(2, 16, 32, dtype=half), [draw(2, 16, p, dtype=half) for p in (32, 16, 16)]
    for _ in range(2):
        for got, g in zip(choice.shared_product_norm_sq(a, gs), gs, strict=True):
            close(got, product_definition(a, g, None), 1e-4)
    assert tried[0] == {"reference", "input_length", "separate"}
    # Separate layers each take their own fastest kernel, measured once.
    others = tried[1:]
    assert len(others) == (2 if fastest == "separate" else 0)
    assert all(kinds == {"reference", "width", "input_length"} for kinds in others)


def test_both_algorithms_are_tried_unless_one_is_hopeless() -> None:
    assert set(choice._worth_trying(2048, 4096, [4096])) == {"width", "input_length"}
    assert list(choice._worth_trying(65536, 128, [128])) == ["width"]
    assert list(choice._worth_trying(16, 8192, [8192])) == ["input_length"]


@pytest.mark.gpu
def test_choices_are_measured_on_the_gpu() -> None:
    a, g = draw(4, 512, 1024, dtype=torch.bfloat16), draw(4, 512, 256, dtype=torch.bfloat16)
    close(choice.product_norm_sq(a, g), product_definition(a, g), 1e-3)
    close(choice.grouped_product_norm_sq([(a, g)] * 3)[1], product_definition(a, g), 1e-3)
    costs = clock.measured()
    assert len(costs) == 2
    for times in costs.values():
        assert {name.split()[0] for name in times} == {"reference", "width", "input_length"}
        assert all(time > 0 for time in times.values())
    before = {key: dict(times) for key, times in costs.items()}
    choice.product_norm_sq(a, g)
    assert clock.measured() == before


@pytest.mark.gpu
def test_no_measurement_while_a_graph_is_captured() -> None:
    a, g = draw(2, 64, 64, dtype=torch.bfloat16), draw(2, 64, 64, dtype=torch.bfloat16)
    triton_kernels.compute_linear_norm_sq(a, g, algorithm="width")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = choice.product_norm_sq(a, g)
    graph.replay()
    close(got, product_definition(a, g), 1e-3)
    assert clock.measured() == {}
