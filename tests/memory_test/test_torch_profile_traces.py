"""Traces, kinds of kernels and memory curves of torch_profile."""

from __future__ import annotations

import copy
import gzip
import json

import pytest
import torch

from memory_test.torch_profile import recording, snapshots
from memory_test.torch_profile.kernel_kinds import KINDS, Kernel, kernels_of, kind_of, summary
from memory_test.torch_profile.model import Shape, build_model
from memory_test.torch_profile.traces import PhaseMap, check_trace, find_traces, read_trace
from memory_test.torch_profile.trainers import TRAINERS, Settings

CPU = torch.device("cpu")
TINY = Shape(vocab=23, width=8, depth=2, heads=2, max_length=12)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Folder and result of each trainer's trace."""
    found = {}
    for name, cls in TRAINERS.items():
        folder = tmp_path_factory.mktemp(name)
        trainer = cls(build_model(TINY, CPU, torch.float32, 0), TINY.vocab, Settings(2, 12))
        found[name] = folder, recording.record(trainer.step, folder, name, CPU)
    return found


# --- names to kinds ---


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", "elementwise"),
        ("void at::native::multi_tensor_apply_kernel<BinaryOpScalarFunctor>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps>>", "reduce"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, NormTwoOps>>", "norm"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, clamp_scalar>", "clip"),
        ("void at::native::vectorized_layer_norm_kernel<float>", "layer_norm"),
        ("void at::native::distribution_elementwise_grid_stride_kernel<normal>", "noise"),
        ("void cunn_SoftMaxForward<8, float>", "loss"),
        ("void at::native::embedding_backward_feature_kernel<float>", "indexing"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("aten::mm", "gemm"),
        ("aten::einsum", "gemm"),
        ("aten::add_", "elementwise"),
        ("aten::_foreach_mul_", "elementwise"),
        ("aten::linalg_vector_norm", "norm"),
        ("aten::clamp_max", "clip"),
        ("aten::sum", "reduce"),
        ("aten::t", "other"),
        ("aten::view", "other"),
    ],
)
def test_the_name_says_the_kind(name, kind):
    assert kind_of(name) == kind


def test_the_phase_says_the_kind_where_the_name_cannot():
    elementwise = "void at::native::vectorized_elementwise_kernel<4, MulFunctor>"
    assert kind_of(elementwise, "clip_factors") == "clip"
    assert kind_of(elementwise, "per_sample_norms") == "norm"
    assert kind_of("_table_kernel", "per_sample_norms") == "norm"
    assert kind_of("aten::mm", "per_sample_norms") == "gemm"
    assert kind_of("aten::view", "clip_factors") == "other"


def event(name, cat, ts, dur, tid=1, **args):
    fields = {"name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}
    return {"ph": "X", "pid": 1, **fields, "args": args}


def gpu_trace():
    """A step on a GPU: kernels run later than they are launched, in another lane."""
    memory = {"Device Type": 1, "Total Allocated": 3 << 20, "Bytes": 1 << 20}
    return {
        "traceEvents": [
            event("ProfilerStep#1", "user_annotation", 0, 100),
            event("forward", "user_annotation", 0, 10),
            event("backward", "user_annotation", 20, 40),
            event("clip_factors", "user_annotation", 30, 10),
            event("step", "user_annotation", 80, 10),
            event("cudaLaunchKernel", "cuda_runtime", 5, 1, correlation=1),
            event("cudaLaunchKernel", "cuda_runtime", 25, 1, tid=2, correlation=2),
            event("cudaLaunchKernel", "cuda_runtime", 35, 1, tid=2, correlation=3),
            event("sm90_gemm", "kernel", 24, 8, tid=7, correlation=1),
            event("elementwise_kernel", "kernel", 62, 4, tid=7, correlation=2),
            event("elementwise_kernel", "kernel", 66, 2, tid=7, correlation=3),
            {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 6, "args": memory},
        ]
    }


def test_kernels_belong_to_the_phase_that_launched_them():
    found = [(k.kind, k.phase, k.ms) for k in kernels_of(gpu_trace())]
    assert found == [
        ("gemm", "forward", 0.008),
        ("elementwise", "backward", 0.004),
        ("clip", "clip_factors", 0.002),
    ]


def test_the_time_of_an_operator_is_without_those_inside():
    trace = {
        "traceEvents": [
            event("aten::linear", "cpu_op", 0, 100),
            event("aten::t", "cpu_op", 10, 20),
            event("aten::addmm", "cpu_op", 40, 50),
            event("aten::linear", "cpu_op", 0, 7, tid=2),
        ]
    }
    found = sorted((k.name, k.ms) for k in kernels_of(trace))
    linear = [("aten::linear", 0.007), ("aten::linear", 0.03)]
    assert found == [("aten::addmm", 0.05), *linear, ("aten::t", 0.02)]


def test_the_summary_is_of_one_step():
    kernels = [Kernel("a", "gemm", "forward", 4.0), Kernel("b", "clip", "clip_factors", 2.0)]
    found = summary(kernels, steps=2)
    assert found["total_ms"] == 3.0 and set(found["kinds_ms"]) == set(KINDS)
    assert found["kinds_ms"]["gemm"] == 2.0 and found["calls"]["clip"] == 0.5
    assert found["phases_by_kind_ms"] == {"forward": {"gemm": 2.0}, "clip_factors": {"clip": 1.0}}
    assert [row["name"] for row in found["longest"]] == ["a", "b"]


# --- soundness ---


def test_a_sound_trace_passes():
    assert check_trace(gpu_trace(), needs_kernels=True) == []


def test_kernels_of_a_stream_may_overlap():
    trace = gpu_trace()
    trace["traceEvents"][9].update(ts=30)  # begins before the kernel before it has ended
    assert check_trace(trace, needs_kernels=True) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda e: e.clear(), "0 of 0"),
        (lambda e: e[0].pop("dur"), "lack a name, a place or a time"),
        (lambda e: e[0].update(ts="5"), "lack a name, a place or a time"),
        (lambda e: e[3].update(dur=100), "overlap without nesting"),
        (lambda e: e.pop(0), "no ProfilerStep"),
        (lambda e: e[1].update(name="x"), "no range forward"),
        (lambda e: e.pop(), "no memory view"),
        (lambda e: e.pop(5), "1 of 3 kernels without their launch"),
        (lambda e: e.__delitem__(slice(8, 11)), "no kernels"),
        (lambda e: e.append({"ph": "f", "cat": "ac2g", "id": 4}), "arrows"),
    ],
)
def test_a_damaged_trace_is_recognised(damage, message):
    trace = copy.deepcopy(gpu_trace())
    damage(trace["traceEvents"])
    assert message in "; ".join(check_trace(trace, needs_kernels=True))


@pytest.mark.parametrize("content", [b"", b'{"traceEvents": [', b"{}", b"[]", b"\xff\xfe"])
@pytest.mark.parametrize("suffix", [".pt.trace.json", ".pt.trace.json.gz"])
def test_a_file_that_is_no_trace_is_named(tmp_path, content, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(content)[:-4] if suffix.endswith("gz") else content)
    with pytest.raises(ValueError, match=r"x\.pt\.trace\.json"):
        read_trace(path)


def test_moments_belong_to_the_innermost_phase():
    phases = PhaseMap(gpu_trace()["traceEvents"])
    moments = {-1: "other", 5: "forward", 15: "other", 25: "backward", 35: "clip_factors"}
    moments |= {45: "backward", 70: "other", 85: "step", 200: "other"}
    assert {m: phases.at(m) for m in moments} == moments


# --- recorded traces ---


@pytest.mark.parametrize("name", TRAINERS)
def test_each_trainer_leaves_a_sound_trace(recorded, name):
    folder, result = recorded[name]
    (path,) = find_traces(folder)
    assert path.name == result["trace"] and path.name.startswith(name)
    assert check_trace(read_trace(path)) == result["trace_faults"] == []
    assert [p.name for p in folder.iterdir()] == [path.name]  # nothing half-written is left


def test_the_phases_are_those_of_the_trainer(recorded):
    phases = {
        name: {p for p, ms in result["kernels"]["phases_ms"].items() if ms > 0}
        for name, (_, result) in recorded.items()
    }
    common = {"forward", "backward", "step"}
    private = common | {"per_sample_norms", "clip_factors", "weighted_sum", "noise"}
    assert phases["StandardTrainer"] >= common and not phases["StandardTrainer"] & (
        private - common
    )
    assert phases["DPSGDTrainer"] >= private | {"per_sample_gradients"}
    assert phases["DPGhostClippingTrainer"] >= private | {"second_backward"}
    assert "per_sample_gradients" not in phases["DPGhostClippingTrainer"]


def test_the_kinds_are_those_of_the_trainer(recorded):
    kinds = {n: result["kernels"]["kinds_ms"] for n, (_, result) in recorded.items()}
    for name, found in kinds.items():
        assert set(found) == set(KINDS)
        assert all(found[kind] > 0 for kind in ("gemm", "attention", "elementwise", "reduce")), name
    assert kinds["StandardTrainer"]["norm"] == kinds["StandardTrainer"]["clip"] == 0
    for name in ("DPSGDTrainer", "DPGhostClippingTrainer"):
        assert all(kinds[name][kind] > 0 for kind in ("norm", "clip", "noise")), name


def test_every_operator_is_in_one_kind_and_one_phase(recorded):
    folder, result = recorded["DPGhostClippingTrainer"]
    trace = read_trace(find_traces(folder)[0])
    events = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
    assert len(kernels_of(trace)) == len(events) > 100
    kernels = result["kernels"]
    total = pytest.approx(kernels["total_ms"], rel=1e-2)
    assert sum(kernels["kinds_ms"].values()) == total
    assert sum(kernels["phases_ms"].values()) == total


def test_memory_is_followed_through_the_step(recorded):
    for _, result in recorded.values():
        memory = result["memory"]
        assert memory["peak_mb"] == max(memory["phases_mb"].values()) > 0
        assert memory["phases_mb"][memory["peak_phase"]] == memory["peak_mb"]
        assert max(value for _, value in memory["curve"]) == pytest.approx(memory["peak_mb"], 1e-2)
        moments = [moment for moment, _ in memory["curve"]]
        assert moments == sorted(moments) and len(moments) > 20


def test_a_long_curve_keeps_its_peaks():
    curve = [(float(i), float(i == 7777)) for i in range(10_000)]
    kept = snapshots.thinned(curve)
    assert len(kept) <= snapshots.POINTS and [7777.0, 1.0] in kept


def test_weights_count_on_a_gpu():
    found = snapshots.memory_summary(gpu_trace(), torch.device("cuda"))
    assert (found["peak_mb"], found["start_mb"], found["peak_phase"]) == (3.0, 2.0, "forward")
    assert snapshots.memory_summary(gpu_trace(), CPU)["curve"] == []


# --- what goes wrong ---


def step_of(name="StandardTrainer"):
    model = build_model(TINY, CPU, torch.float32, 0)
    return TRAINERS[name](model, TINY.vocab, Settings(2, 12)).step


def test_an_earlier_trace_is_replaced(tmp_path):
    first = recording.record(step_of(), tmp_path, "one", CPU)
    second = recording.record(step_of(), tmp_path, "one", CPU)
    assert [p.name for p in find_traces(tmp_path)] == [second["trace"]] != [first["trace"]]


def test_a_failed_step_keeps_the_earlier_trace(tmp_path):
    first = recording.record(step_of(), tmp_path, "one", CPU)

    def broken():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        recording.record(broken, tmp_path, "one", CPU)
    assert [p.name for p in tmp_path.iterdir()] == [first["trace"]]


def test_a_trace_that_was_cut_off_keeps_the_earlier_one(tmp_path, monkeypatch):
    """A full disk: the profiler itself does not always say so."""
    first = recording.record(step_of(), tmp_path, "one", CPU)
    profiled = recording._profile

    def cut_off(step, folder, *args):
        profiled(step, folder, *args)
        (path,) = find_traces(folder)
        path.write_bytes(path.read_bytes()[:-200])

    monkeypatch.setattr(recording, "_profile", cut_off)
    with pytest.raises(recording.StorageError, match="is the disk full"):
        recording.record(step_of(), tmp_path, "one", CPU)
    assert [p.name for p in tmp_path.iterdir()] == [first["trace"]]


def test_no_snapshot_without_a_gpu(tmp_path):
    assert recording.snapshot(step_of(), tmp_path, CPU) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", TRAINERS)
def test_kernels_and_snapshot_on_a_gpu(tmp_path, name):
    import pickle

    device = torch.device("cuda", 0)
    model = build_model(TINY, device, torch.float32, 0)
    step = TRAINERS[name](model, TINY.vocab, Settings(2, 12)).step
    result = recording.record(step, tmp_path, name, device)
    trace = read_trace(find_traces(tmp_path)[0])
    assert check_trace(trace, needs_kernels=True) == []
    assert all(result["kernels"]["kinds_ms"][kind] > 0 for kind in ("gemm", "elementwise"))
    assert result["memory"]["peak_mb"] > 0
    kept = tmp_path / recording.snapshot(step, tmp_path, device)
    assert pickle.loads(kept.read_bytes())["segments"]
    assert json.dumps(result)
