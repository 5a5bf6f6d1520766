"""The clock of phases, memory, and the comparison of deferred and immediate norms."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memory_test.common import deferred
from memory_test.common.deferred import check_mode
from memory_test.common.memory import MB, MemoryWatch, size_of
from memory_test.common.phases import PhaseClock, times_of_collectives
from opacus.grad_sample import GradSampleModuleFastGradientClipping

CPU = torch.device("cpu")


def test_a_phase_does_not_count_what_lies_in_it(monkeypatch):
    clock, seconds = PhaseClock(CPU), iter([1.0, 3.0, 6.0, 7.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    with clock.phase("outer"), clock.phase("inner"):
        pass
    assert clock.take() == {"outer": 3000.0, "inner": 3000.0}
    assert clock.take() == {}


def test_methods_are_timed_and_still_work():
    class Thing:
        def double(self, x, *, plus=0):
            return 2 * x + plus

    thing, clock = Thing(), PhaseClock(CPU)
    clock.wrap(thing, "double", "doubling")
    clock.wrap(thing, "missing", "nothing")
    assert thing.double(3, plus=1) == 7
    assert set(clock.take()) == {"doubling"}


def test_memory_by_kind():
    model = nn.Linear(256, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    watch = MemoryWatch(model, optimizer, CPU)
    x = torch.randn(64, 256)
    with watch.forward():
        loss = torch.tanh(model(x)).sum()
    loss.backward()
    optimizer.step()
    found = watch.breakdown()
    size = (256 * 512 + 512) * 4 / MB
    assert found["parameters"] == pytest.approx(size, abs=1e-3)
    assert found["gradients"] == pytest.approx(size, abs=1e-3)
    assert found["optimizer"] == pytest.approx(2 * size, abs=1e-3)
    # The input and what tanh keeps of its output.
    assert found["activations"] == pytest.approx((64 * 256 + 64 * 512) * 4 / MB, abs=1e-3)
    assert found["norm_cache"] == found["per_sample_gradients"] == 0


def test_storages_are_counted_once():
    tensor = torch.zeros(1000)
    assert size_of([tensor, tensor[:10], tensor.view(10, 100)]) == 4000


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_deferred_norms_are_right(mode):
    errors = check_mode(mode, CPU, batch=4)
    assert len(errors) == 4 and all(e.holds for e in errors), errors


def test_wrong_deferred_norms_are_found(monkeypatch):
    inner = GradSampleModuleFastGradientClipping.compute_all_norms_parallel

    def wrong(self):
        norms = inner(self)
        if self._use_deferred_norm:
            self.per_sample_gradient_norms = norms * 1.001
        return norms

    monkeypatch.setattr(GradSampleModuleFastGradientClipping, "compute_all_norms_parallel", wrong)
    assert not all(e.holds for e in check_mode("ghost", CPU, batch=4))


def test_norms_that_do_not_wait_are_noticed(monkeypatch):
    monkeypatch.setattr(deferred, "_count_waiting", lambda private: [0])
    with pytest.raises(RuntimeError, match="0 norms waited in mode ghost with deferred_norm=True"):
        check_mode("ghost", CPU, batch=4)


def test_nan_is_an_error():
    assert not deferred.Error("x", float("nan"), 1.0).holds


def test_of_collectives_on_a_gpu_only_kernels_count():
    def event(name, on_gpu, microseconds):
        kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
        span = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(name=name, device_type=kind, time_range=span)

    events = [
        event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(args)", True, 3000),
        event("nccl:_reduce_scatter_base", True, 9000),  # the range around it
        event("nccl:_reduce_scatter_base", False, 9000),
        event("ncclDevKernel_AllGather_RING_LL(args)", True, 2000),
        event("gloo:all_reduce", False, 5000),
    ]
    gpu = times_of_collectives(events, cuda=True)
    assert gpu == {"reduce_scatter": 3.0, "all_gather": 2.0, "all_reduce": 0.0}
    assert times_of_collectives(events, cuda=False)["all_reduce"] == 5.0
