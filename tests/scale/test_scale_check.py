"""The cost model against every measured cell: what holds, what is missed, and what is only listed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from memory_test.benchmarks import scale_cells, scale_check
from memory_test.scale import Rates, Run, rates_of
from memory_test.scale.prediction import predict

# Steps whose pace the host sets and that are predicted worse than 15%: file, mode, tokens, and why.
KNOWN_MISSES = {
    # The host itself: 174, 127 and 160 ms for the same work at 1024, 2048 and 4096 tokens.
    ("llama3-1b_h200x2_2026-11-28_series", "no_dp", 2048),
    ("llama3-1b_h200x2_2026-11-28_series", "no_dp", 4096),
    # Checkpointing: 1.38 and 1.33 of the non-private step in this one call; not explained.
    ("llama3_h200x2_2026-11-28_large_and_long", "ghost_fsdp_bk", 512),
    ("llama3_h200x2_2026-11-28_large_and_long", "ghost_fsdp_bk", 4096),
    # 1.28 and 1.24 of the non-private step in the two calls of that day, 1.10 at 1024 tokens.
    ("llama3_h200x2_2026-11-29_whole_steps", "ghost_fsdp_bk", 4096),
    # 0.92: lone samples run without taps since that call.
    ("llama3_h200_2026-11-29_whole_steps", "ghost_fsdp_bk", 4096),
    # A fast host: 101 ms, where that of the fit took 145. The ratio of both, 1.06, is predicted.
    ("llama3-1b_h200_2026-11-30_full_before", "no_dp", 4096),
    ("llama3-1b_h200_2026-11-30_full_before", "ghost_fsdp_bk", 4096),
    # Eager: the private step took less than the non-private one, whose host was at other work.
    ("llama3-3b_h200_2026-11-30_checkpoints_compiled", "ghost_fsdp_bk", 4096),
}
# The same where the device does, by the model.
KNOWN_OF_DEVICE = {
    # 16x512, where slow hosts take longer than the device: 1.44 to 1.54 on two cards, 1.17 to 1.52.
    ("llama3_h200x2_2026-11-29_whole_steps", "ghost_fsdp_bk", 512),
    ("llama3_h200_2026-11-29_whole_steps", "ghost_fsdp_bk", 512),
    # 1.13, and 1.12 in later calls: norms are taken together now; the model knows 1.28.
    ("llama3-1b_h200_2026-11-30_full_before", "ghost_fsdp_bk", 512),
    # 8B, one sample, checkpoints: 1.04 and 1.06 of a step that is predicted 13% and 8% too long.
    ("llama3_h200_2026-11-29_whole_steps", "ghost_fsdp_bk", 4096),
    ("llama3_h200x2_2026-11-29_whole_steps", "ghost_fsdp_bk", 4096),
}


@pytest.fixture(scope="module")
def compared():
    return scale_check.compare_all()


def test_where_the_device_sets_the_pace_every_cell_is_predicted_to_15_percent(compared):
    by_device = [one for one in compared if not one.host_bound]
    assert len([one for one in by_device if not one.fitted]) >= 120
    wrong = scale_check.time_misses(by_device)
    found = {(c.measured.file, c.measured.run.mode, c.measured.run.tokens) for c in wrong}
    assert found == KNOWN_OF_DEVICE, scale_check.markdown(wrong)


def test_where_the_host_does_the_known_cells_of_todays_package_are_missed(compared):
    today = [one for one in compared if one.host_bound and not one.earlier_time]
    assert len([one for one in today if not one.fitted]) >= 35
    wrong = scale_check.time_misses(today)
    found = {(c.measured.file, c.measured.run.mode, c.measured.run.tokens) for c in wrong}
    assert found == KNOWN_MISSES, scale_check.markdown(wrong)


def test_memory_of_todays_package_is_predicted_to_15_percent(compared):
    today = [one for one in compared if not one.measured.earlier_memory]
    assert len(today) >= 140 and len(today) >= 0.9 * len(compared)
    wrong = scale_check.memory_misses(today)
    assert not wrong, scale_check.markdown(wrong)


def test_long_samples_with_checkpointing_are_predicted_closely(compared):
    long = [c for c in compared if c.measured.run.checkpointing and c.measured.run.tokens > 8192]
    assert len(long) == 4
    assert all(abs(one.memory_error) < 0.02 for one in long), scale_check.markdown(long)


def test_only_private_steps_of_named_files_are_of_an_earlier_package(compared):
    files = {one.measured.file for one in compared}
    assert files >= scale_cells.EARLIER_HOST and files >= scale_cells.EARLIER_DEFERRED
    for one in compared:
        run, file = one.measured.run, one.measured.file
        assert not one.earlier_time or (run.private and file in scale_cells.EARLIER_HOST)
        assert not one.measured.earlier_memory or run.deferred


def test_no_cell_is_left_out_of_the_counts(compared):
    found = scale_check.counts(compared)
    times = [of for what, (_, of) in found.items() if what.startswith("time, the")]
    assert sum(times) == found["time, all of these"][1] == sum(not c.fitted for c in compared)
    assert found["time, fitted cells too"][1] == len(compared)
    assert found["memory"][1] + found["memory, earlier package (listed only)"][1] == len(compared)
    within = sum(found[what][0] for what in found if what.startswith("time, the"))
    assert within == found["time, all of these"][0]
    text = scale_check.summary(compared)
    assert all(f"| {what} | {n} | {of} |" in text for what, (n, of) in found.items())


def test_most_cells_are_checks_and_not_fits(compared):
    known = {(c.measured.file, c.measured.run.mode, c.measured.run.batch, c.measured.run.tokens)
             for c in compared}  # fmt: skip
    assert known >= scale_cells.FITTED  # a renamed file would turn fits into checks
    fitted = sum(one.fitted for one in compared)
    calls = len({(c.measured.file, c.measured.call) for c in compared})
    assert len(scale_cells.FITTED) <= fitted <= len(scale_cells.FITTED) + calls
    assert len(compared) - fitted >= 2 * fitted


def test_ratios_of_the_host_are_means_of_the_fitted_cells(compared):
    at = {(c.measured.file, c.measured.run.mode, c.measured.run.batch, c.measured.run.tokens):
          c.measured.ms for c in compared if not c.measured.run.deferred}  # fmt: skip
    calls: dict[str, dict[str, list[float]]] = {}
    for file, mode, batch, tokens in scale_cells.FITTED:
        if file in (scale_cells.FIRST, scale_cells.BUDGETS) or mode == "no_dp":
            continue
        run = Run(next(iter(compared)).measured.run.shape, 2, tokens, batch, mode)
        name = "host_ratio_" + run.strategy
        name += "_flash" * (run.strategy == "one_pass" and mode.startswith("flash"))
        ratio = at[file, mode, batch, tokens] / at[file, "no_dp", batch, tokens]
        calls.setdefault(name, {}).setdefault(file, []).append(ratio)
    assert len(calls) == 3
    for name, by_call in calls.items():
        means = [sum(found) / len(found) for found in by_call.values()]
        mean = sum(means) / len(means)
        assert getattr(rates_of("h200"), name) == pytest.approx(mean, abs=0.01), name


def steps_file(folder, *cells):
    """A file of ``steps.py``: ``(batch, tokens, {mode: ms})`` each, on two H200."""
    rows = {
        "layout": "results 1", "device": "NVIDIA H200", "world": 2,
        "cells": [
            {"model": "llama3-1b", "batch": batch, "tokens": tokens, "wrapping": "blocks",
             "lora_rank": 0, "checkpointing": False,
             "rows": [{"mode": mode, "deferred": False, "private": mode != "no_dp", "status": "ok", "peak_gb": 10.0,
                       "package": "torch" if mode == "no_dp" else "this package",
                       "ms": {"median": ms}} for mode, ms in times.items()]}
            for batch, tokens, times in cells
        ],
    }  # fmt: skip
    path = folder / "found.json"
    path.write_text(json.dumps(rows))
    return path


def test_a_private_step_is_predicted_from_the_non_private_step_of_its_cell(tmp_path):
    path = steps_file(
        tmp_path,
        (1, 512, {"no_dp": 200.0, "ghost_fsdp": 400.0}),
        (1, 1024, {"no_dp": 140.0, "ghost_fsdp": 280.0}),
        (1, 8192, {"no_dp": 210.0, "ghost_fsdp": 400.0}),  # as long as the device needs
    )
    found = {
        (c.measured.run.tokens, c.measured.run.mode): c for c in scale_check.compare_file(path)
    }
    ratio = rates_of("h200").host_ratio_two_pass
    assert found[512, "ghost_fsdp"].ms == pytest.approx(200 * ratio)
    assert found[1024, "ghost_fsdp"].ms == pytest.approx(140 * ratio)
    assert found[8192, "ghost_fsdp"].speed_of is found[1024, "no_dp"].measured  # the nearest
    # The smallest tells the speed of the others, and nothing about itself.
    assert found[512, "no_dp"].fitted and not found[1024, "no_dp"].fitted
    assert found[1024, "no_dp"].ms == pytest.approx(200)
    assert found[8192, "no_dp"].speed_of is found[1024, "no_dp"].measured
    assert list(scale_check.scatter(found.values())) == [("found", 140.0, 200.0)]


def test_the_host_of_another_call_tells_nothing(compared):
    two = [c for c in compared if c.measured.file == "llama3-1b_h200_2026-11-28_one_pass"]
    assert {c.measured.call for c in two} == {1, 2}
    assert all(c.speed_of is None or c.speed_of.call == c.measured.call for c in two)


def test_a_worse_ratio_would_be_missed(tmp_path, monkeypatch):
    path = steps_file(tmp_path, (1, 512, {"no_dp": 150.0, "ghost_fsdp": 300.0}))
    assert not scale_check.time_misses(scale_check.compare_file(path))
    rates: Rates = replace(rates_of("h200"), host_ratio_two_pass=2.62)
    monkeypatch.setattr(scale_check, "rates_of", lambda card: rates)
    (missed,) = scale_check.time_misses(scale_check.compare_file(path))
    assert missed.measured.run.mode == "ghost_fsdp"
    assert predict(missed.measured.run, rates).duration.bound_by == "host"
