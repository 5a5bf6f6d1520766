"""The rules of grad_sample_mode="auto", and the facts that they are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from opacus.core.platform import sharded
from opacus.core.platform.sizes import STORED_SHARE
from opacus.core.ranks.shards import can_reduce
from opacus.core.step import auto
from opacus.core.step.auto import Facts, choose_mode, chosen_for, facts_of
from opacus.core.step.modes import AUTO, MODES, mode_of

GB = 2**30
CPU = Facts()
GPU = Facts(device="cuda", triton=True, sample_bytes=2 * GB, device_bytes=80 * GB)
LARGE = {"checkpointed": True, "sample_bytes": 41 * GB}

CASES = {
    "cpu": (CPU, "ghost_bk", "on 'cpu'"),
    "cpu with Triton": (replace(CPU, triton=True), "ghost_bk", "on 'cpu'"),
    "one gpu": (GPU, "flash_bk", "whichever is faster"),
    "gpu without Triton": (replace(GPU, triton=False), "ghost_bk", "Triton is not installed"),
    "another accelerator": (replace(GPU, device="mps"), "ghost_bk", "on 'mps'"),
    "per layer": (replace(GPU, clipping="per_layer"), "flash_bk", "one backward pass"),
    "adaptive": (replace(GPU, clipping="adaptive"), "hooks", "clipping='adaptive'"),
    "fsdp, cpu": (replace(CPU, sharded=True), "ghost_fsdp_bk", "sharded by FSDP2"),
    "fsdp, gpu": (replace(GPU, sharded=True), "ghost_fsdp_bk", "takes the host longer"),
    "fsdp, per layer": (
        replace(GPU, sharded=True, clipping="per_layer"),
        "ghost_fsdp_bk",
        "one backward pass",
    ),
    "tensor parallel": (replace(GPU, split=True), "ghost_tp", "tensor parallelism"),
    "tensor parallel, cpu": (replace(CPU, split=True), "ghost_tp", "tensor parallelism"),
    "tensor parallel, per layer": (
        replace(GPU, split=True, clipping="per_layer"),
        "ghost_tp",
        "tensor parallelism",
    ),
    "fsdp and tensor parallel, cpu": (
        replace(CPU, sharded=True, split=True, reducible=False),
        "ghost_fsdp",
        "more than one axis",
    ),
    "fsdp and tensor parallel, gpu": (
        replace(GPU, sharded=True, split=True, reducible=False),
        "flash_fsdp",
        "more than one axis",
    ),
    "gradients that cannot be stored, checkpointed": (
        replace(GPU, sharded=True, **LARGE),
        "flash_fsdp",
        "41 GB",
    ),
    "the same in one process": (replace(GPU, **LARGE), "flash", "two backward passes"),
    "the same on a larger card": (
        replace(GPU, sharded=True, **LARGE, device_bytes=141 * GB),
        "ghost_fsdp_bk",
        "one backward pass",
    ),
    "the same, not checkpointed": (
        replace(GPU, sharded=True, sample_bytes=41 * GB),
        "ghost_fsdp_bk",
        "one backward pass",
    ),
    "exactly half, checkpointed": (
        replace(GPU, checkpointed=True, sample_bytes=int(80 * GB * STORED_SHARE)),
        "flash_bk",
        "one backward pass",
    ),
    "no limit is known": (replace(CPU, **LARGE), "ghost_bk", "one backward pass"),
}


@pytest.mark.parametrize("case", CASES)
def test_choice(case: str) -> None:
    facts, mode, reason = CASES[case]
    choice = choose_mode(facts)
    assert choice.mode == mode
    assert any(reason in why for why in choice.reasons), choice.reasons
    text = str(choice)
    assert repr(mode) in text and all(why in text for why in choice.reasons)


@pytest.mark.parametrize("wrapping", ["sharded", "split"])
def test_adaptive_clipping_of_sharded_models_is_refused(wrapping: str) -> None:
    with pytest.raises(ValueError, match="PrivacyEngineAdaptiveClipping"):
        choose_mode(Facts(clipping="adaptive", **{wrapping: True}))  # type: ignore[arg-type]


def test_only_these_modes_are_ever_chosen() -> None:
    chosen = {mode for _, mode, _ in CASES.values()}
    never = {"functorch", "ew", "no_op", "flash_fsdp_bk"}
    assert chosen == set(MODES) - never - {"ghost"}  # which see below
    assert choose_mode(replace(GPU, **LARGE, triton=False)).mode == "ghost"


def test_auto_is_no_mode_of_the_table() -> None:
    assert AUTO not in MODES
    with pytest.raises(ValueError, match="depends on the model"):
        mode_of(AUTO)
    with pytest.raises(ValueError, match=r"no_op, .*, auto"):
        mode_of("fastest")


# --- the facts ---


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def test_facts_of_a_plain_model() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    known = facts_of(model, "per_layer")
    assert (known.sharded, known.split, known.checkpointed) == (False, False, False)
    assert known.reducible and known.clipping == "per_layer" and known.device == "cpu"
    assert known.sample_bytes == 4 * (6 + 12 + 2) and known.device_bytes is None


def test_facts_do_not_touch_the_model() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert facts_of(model) == facts_of(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_checkpointing_is_seen() -> None:
    switched = net()
    switched[2].gradient_checkpointing = True  # as transformers does
    assert facts_of(switched).checkpointed
    switched[2].gradient_checkpointing = False
    assert not facts_of(switched).checkpointed
    assert facts_of(nn.Sequential(checkpoint_wrapper(nn.Linear(4, 6)))).checkpointed


def test_what_is_missing_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "triton_is_installed", lambda: True)
    assert facts_of(net()).triton and chosen_for(net()).mode == "ghost_bk"
    monkeypatch.setattr(auto, "triton_is_installed", lambda: False)
    assert not facts_of(net()).triton


@pytest.mark.gpu
def test_facts_of_a_model_on_a_gpu() -> None:
    known = facts_of(net().cuda())
    assert known.device == "cuda" and known.device_bytes is not None
    assert known.device_bytes == torch.cuda.get_device_properties(0).total_memory
    assert chosen_for(net().cuda()).mode == ("flash_bk" if known.triton else "ghost_bk")


def test_facts_of_sharded_and_split_models(one_rank: None) -> None:
    del one_rank
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = net()
    fully_shard(model, mesh=mesh["data"])
    known = facts_of(model)
    assert known.sharded and known.reducible and not known.split
    assert known.sample_bytes == 4 * (24 + 6 + 12 + 2)
    split = parallelize_module(net(), mesh["tensor"], {"0": ColwiseParallel()})
    known = facts_of(split)
    assert known.split and not known.sharded and choose_mode(known).mode == "ghost_tp"
    fully_shard(split, mesh=mesh["data"])
    known = facts_of(split)
    assert known.sharded and known.split and not known.reducible
    assert choose_mode(known).mode == "ghost_fsdp"


def test_gradients_have_the_type_that_layers_compute_in(one_rank: None) -> None:
    del one_rank
    model = net()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert facts_of(model).sample_bytes == 2 * (24 + 6 + 12 + 2)


def test_a_part_that_is_sharded_makes_a_sharded_model(one_rank: None) -> None:
    del one_rank
    model = net()
    fully_shard(model[2], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert chosen_for(model).mode == "ghost_fsdp_bk"  # which says what is left to shard


def test_offloaded_parameters_count_as_where_they_compute() -> None:
    class OnCpu:
        device = torch.device("cpu")
        device_mesh = type("Mesh", (), {"device_type": "cuda"})

    offloaded: Any = OnCpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "is_dtensor", lambda value: isinstance(value, OnCpu))
        assert sharded.compute_device(offloaded).type == "cuda"
    assert CPUOffloadPolicy().pin_memory  # the policy that leaves them there


@pytest.mark.parametrize(
    "placements, fits",
    [
        ((Shard(0),), True),
        ((Shard(1),), True),
        ((Replicate(), Shard(0)), True),
        ((Shard(0), Shard(0)), False),
        ((Shard(0), Replicate()), False),
        ((Replicate(), Replicate(), Shard(0)), False),
        ((Replicate(),), False),
        ((), False),
    ],
)
def test_placements_that_single_backward_modes_can_reduce(
    placements: tuple[Any, ...], fits: bool
) -> None:
    assert can_reduce(placements) is fits
