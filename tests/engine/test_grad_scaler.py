"""torch.amp.GradScaler: C applies to the true gradients, and a skipped step is counted."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import run_distributed
from tests.helpers.modes import B, assert_close, oracle, private, trainable
from tests.helpers.problems import PROBLEMS, build, criterion

SCALE = 1024.0
MODES = ["hooks", "functorch", "ghost", "ghost-deferred", "ghost_bk", "flash", "flash_bk"]


def scaler(scale: float = SCALE, **kwargs: Any) -> torch.amp.GradScaler:
    device = torch.get_default_device().type
    return torch.amp.GradScaler(device, init_scale=scale, **kwargs)


def make(mode: str, clip: float, **kwargs: Any) -> tuple[Any, Any, Any]:
    if mode.endswith("-deferred"):
        kwargs["deferred_norm"] = True
    return private("mlp", mode.split("-")[0], clip, **kwargs)


def batch() -> tuple[Tensor, Tensor]:
    """The batch as drawn on the CPU, on the default device."""
    with torch.device("cpu"):
        inputs, targets = PROBLEMS["mlp"].batch(B)
    device = torch.get_default_device()
    return inputs.to(device), targets.to(device)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clip", [0.5, 1e6])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_equals_oracle(mode: str, clip: float, reduction: str, unscale: bool) -> None:
    inputs, targets = batch()
    want, norms = oracle("mlp", inputs, targets, clip)
    assert clip > 1 or (norms > clip).any()
    model, optimizer, loss_fn = make(mode, clip, reduction=reduction)
    amp = scaler()
    for _ in range(2):
        weights = copy.deepcopy([p.data for p in trainable(model)])
        optimizer.zero_grad()
        amp.scale(loss_fn(model(inputs), targets)).backward()
        if unscale:
            amp.unscale_(optimizer)
        amp.step(optimizer)
        amp.update()
        divisor = B if reduction == "mean" else 1
        assert_close([p.grad for p in trainable(model)], [w / divisor for w in want])
        for p, w in zip(trainable(model), weights, strict=True):
            p.data.copy_(w)
    if mode not in ("hooks", "functorch"):
        torch.testing.assert_close(
            model.per_sample_gradient_norms.double(), norms, rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_per_layer_clipping(mode: str) -> None:
    runs = []
    for amp in (scaler(enabled=False), scaler()):
        kwargs = {"clipping": "per_layer"}
        model, optimizer, loss_fn = private("mlp", mode, [0.2, 0.1, 0.3], **kwargs)
        amp.scale(loss_fn(model(batch()[0]), batch()[1])).backward()
        amp.step(optimizer)
        runs.append([p.grad.double() for p in trainable(model)])
    assert_close(runs[1], runs[0])


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("unscale", [False, True])
def test_adaptive_clipping_sees_true_norms(unscale: bool) -> None:
    def final(amp: Any, mode: str) -> float:
        torch.manual_seed(0)
        engine = PrivacyEngine() if mode == "hooks" else PrivacyEngineAdaptiveClipping()
        kwargs = {"clipping": "adaptive", "unclipped_num_std": 5.0} if mode == "hooks" else {}
        model = build("mlp")
        out = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            criterion=criterion("mlp"),
            data_loader=DataLoader(TensorDataset(*PROBLEMS["mlp"].batch(400)), batch_size=100),
            noise_multiplier=0.01,
            max_grad_norm=0.2,
            poisson_sampling=False,
            grad_sample_mode=mode,
            target_unclipped_quantile=0.9,
            clipbound_learning_rate=0.5,
            min_clipbound=1e-3,
            max_clipbound=1e3,
            **kwargs,
        )
        loss_fn = out[2] if len(out) == 4 else criterion("mlp")
        for inputs, targets in out[-1]:
            out[1].zero_grad()
            amp.scale(loss_fn(out[0](inputs), targets)).backward()
            if unscale and amp.is_enabled():
                amp.unscale_(out[1])
            amp.step(out[1])
            amp.update()
        return float(out[1].max_grad_norm)

    for mode in ("hooks", "ghost"):
        plain, scaled = final(scaler(enabled=False), mode), final(scaler(), mode)
        assert plain > 0.25 and scaled == pytest.approx(plain, rel=1e-5)


# --- half precision: where the scale matters ---


def half_gradients(mode: str, amp: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients under fp16 autocast of a loss so small that backprops underflow; oracle's."""
    inputs, targets = batch()
    want, _ = oracle("mlp", inputs, targets, 1e6)
    tiny = 1e-7
    model, optimizer, loss_fn = make(mode, 1e6)
    with torch.autocast("cpu", torch.float16):
        outputs = model(inputs)
    amp.scale(loss_fn(outputs.float(), targets) * tiny).backward()
    amp.step(optimizer)
    return [p.grad for p in trainable(model)], [w * tiny / B for w in want]


@pytest.mark.parametrize("mode", MODES)
def test_small_gradients_survive_half_precision(mode: str) -> None:
    got, want = half_gradients(mode, scaler(2.0**20))
    assert_close(got, want, tolerance=2e-2)
    lost, _ = half_gradients(mode, scaler(enabled=False))
    with pytest.raises(AssertionError):  # the scale is what saved them
        assert_close(lost, want, tolerance=0.2)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_scale_that_just_fits_loses_no_sample(mode: str) -> None:
    """Per-sample gradients of a mean are B times what autograd has to hold in fp16."""
    inputs, targets = batch()
    want, _ = oracle("mlp", inputs, targets, 0.5)
    model, optimizer, loss_fn = make(mode, 0.5)
    amp = scaler(2.0**17)
    with torch.autocast("cpu", torch.float16):
        outputs = model(inputs)
    amp.scale(loss_fn(outputs.float(), targets)).backward()
    amp.step(optimizer)
    assert optimizer.skipped_samples == 0
    assert_close([p.grad for p in trainable(model)], [w / B for w in want], tolerance=2e-2)


def engine_run(mode: str, batch_size: int = B, **kwargs: Any) -> tuple[Any, Any, Any, Any, Any]:
    model, engine = build("mlp"), PrivacyEngine()
    out = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion("mlp"),
        data_loader=DataLoader(TensorDataset(*PROBLEMS["mlp"].batch(4 * B)), batch_size=batch_size),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        grad_sample_mode=mode,
        **kwargs,
    )
    loss_fn = out[2] if len(out) == 4 else criterion("mlp")
    return out[0], out[1], loss_fn, out[-1], engine


def half_backward(model: Any, loss_fn: Any, amp: Any, inputs: Tensor, targets: Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        outputs = model(inputs)
    amp.scale(loss_fn(outputs.float(), targets)).backward()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("mode", [*MODES[:3], "ghost_bk"])
def test_an_overflow_skips_the_step_and_is_counted(mode: str, unscale: bool) -> None:
    model, optimizer, loss_fn, _, engine = engine_run(mode)
    before = copy.deepcopy(list(model.parameters()))
    amp = scaler(2.0**40)
    for steps in range(1, 61):
        optimizer.zero_grad()
        half_backward(model, loss_fn, amp, *batch())
        if unscale:
            amp.unscale_(optimizer)
        amp.step(optimizer)
        scale = amp.get_scale()
        amp.update()
        assert len(engine.accountant) == steps
        if amp.get_scale() == scale:
            break
        for p, b in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p, b, rtol=0, atol=0)
    assert 1 < steps < 40  # it did overflow, and then found a scale that works
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(next(iter(model.parameters())), before[0])


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_an_overflow_in_one_physical_batch_skips_the_logical_one(mode: str) -> None:
    model, optimizer, loss_fn, loader, engine = engine_run(mode, poisson_sampling=False)
    before, amp = copy.deepcopy(list(model.parameters())), scaler()
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    moved = []
    with manager as physical:
        for i, (inputs, targets) in enumerate(physical):
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            amp.scale(loss * (1e38 if i == 1 else 1.0)).backward()
            amp.step(optimizer)
            amp.update()
            if (i + 1) % 3 == 0:
                moved.append(not torch.equal(next(iter(model.parameters())), before[0]))
    assert len(moved) == 4 and moved == [False, True, True, True]
    assert len(engine.accountant) == 4
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_skipped_step_leaves_nothing_to_be_counted_by_adaptive_clipping() -> None:
    """Its samples may come again in the next one, and would count twice."""
    how = {"clipping": "adaptive", "unclipped_num_std": 5.0}
    model, optimizer, loss_fn, _, engine = engine_run("hooks", poisson_sampling=False, **how)
    amp, seen = scaler(), []
    for i in range(4):
        optimizer.signal_skip_step(i % 2 == 0)
        inputs, targets = batch()
        amp.scale(loss_fn(model(inputs), targets) * (1e38 if i == 1 else 1.0)).backward()
        amp.step(optimizer)
        seen.append(optimizer.sample_size)
        amp.update()
    assert seen == [B, 0, B, 0] and len(engine.accountant) == 2


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_an_empty_batch_is_a_step_of_noise(mode: str) -> None:
    model, optimizer, loss_fn, _, engine = engine_run(mode)
    before, amp = copy.deepcopy(list(model.parameters())), scaler()
    inputs, targets = batch()
    amp.scale(loss_fn(model(inputs[:0]), targets[:0])).backward()
    amp.step(optimizer)
    amp.update()
    assert len(engine.accountant) == 1 and amp.get_scale() == SCALE
    assert not torch.equal(next(iter(model.parameters())), before[0])


def test_gradients_of_the_user() -> None:
    """`no_op` mode: no ``p.grad`` for the scaler to look at."""
    model, optimizer, _ = private("mlp", "no_op", 0.5)
    inputs, targets = batch()
    want, _ = oracle("mlp", inputs, targets, 0.5)
    amp = scaler()
    for p in trainable(model):
        p.grad_sample = torch.zeros(B, *p.shape)
    for i in range(B):
        loss = nn.functional.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1])
        for p, g in zip(
            trainable(model), torch.autograd.grad(amp.scale(loss), trainable(model)), strict=True
        ):
            p.grad_sample[i] = g
    amp.step(optimizer)
    assert_close([p.grad for p in trainable(model)], [w / B for w in want])


# --- what is refused, and what is not a scale ---


def test_a_scaled_gradient_needs_the_scalers_step() -> None:
    model, optimizer, loss_fn = make("ghost", 0.5)
    scaler().scale(loss_fn(model(batch()[0]), batch()[1])).backward()
    with pytest.raises(RuntimeError, match=r"scaler\.step"):
        optimizer.step()


def test_a_scalers_step_needs_a_scaled_gradient() -> None:
    model, optimizer, loss_fn = make("ghost", 0.5)
    amp = scaler()
    amp.scale(torch.ones(()))
    loss_fn(model(batch()[0]), batch()[1]).backward()
    with pytest.raises(RuntimeError, match=r"scaler\.scale"):
        amp.step(optimizer)


def test_batches_of_one_step_have_one_scale() -> None:
    model, _, loss_fn = make("ghost", 0.5)
    scaler().scale(loss_fn(model(batch()[0]), batch()[1])).backward()
    with pytest.raises(RuntimeError, match="loss scale"):
        scaler(2.0).scale(loss_fn(model(batch()[0]), batch()[1])).backward()


def test_a_weight_is_not_a_scale() -> None:
    """A loss times 2 has gradients twice as large, which are clipped at the same C."""
    inputs, targets = batch()
    _, norms = oracle("mlp", inputs, targets, 1.0)
    for weight in (2, torch.tensor(2.0)):
        model, optimizer, loss_fn = make("ghost", 0.5)
        amp = scaler()
        amp.scale(weight * loss_fn(model(inputs), targets) / 4 + 1.0).backward()
        torch.testing.assert_close(model.per_sample_gradient_norms.double(), norms / 2)
        amp.step(optimizer)
        scaled = [p.grad.double() for p in trainable(model)]
        model, optimizer, loss_fn = make("ghost", 0.5)
        (torch.mul(loss_fn(model(inputs), targets), weight) / 4).backward()
        optimizer.step()
        assert_close(scaled, [p.grad.double() for p in trainable(model)])


def test_arithmetic_on_scaled_losses() -> None:
    model, _, loss_fn = make("ghost", 0.5)
    amp = scaler()
    loss = loss_fn(model(batch()[0]), batch()[1])
    scaled = amp.scale(loss)
    assert isinstance(scaled, torch.Tensor)
    assert float(scaled) == pytest.approx(SCALE * float(loss))
    for good in (scaled / 2, scaled + 1, -scaled, scaled + amp.scale(loss), scaled.mean()):
        assert float(good.loss_scale) == SCALE
    assert [float(s.loss_scale) for s in amp.scale([loss, loss])] == [SCALE, SCALE]
    for bad in (
        lambda: scaled**2,
        lambda: scaled * scaled,
        lambda: 1 / scaled,
        lambda: scaled + loss,
    ):
        with pytest.raises(ValueError, match="scale"):
            bad()
    with pytest.raises(ValueError, match="losses became"):
        loss * torch.ones(2, 1)


# --- several ranks ---

SPLIT = [3, 2]


def rank_run(
    rank: int, _: int, how: str, mode: str, deferred: bool, bad_rank: int | None
) -> dict[str, Any]:
    os.environ["OPACUS_USE_DEFERRED_NORM"] = str(int(deferred))
    model, engine = build("mlp").to(torch.get_default_device()), PrivacyEngine()
    model = FSDP2Wrapper(model) if how == "fsdp" else DPDDP(model)
    out = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion("mlp", "sum"),
        data_loader=DataLoader(TensorDataset(*batch()), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
        loss_reduction="sum",
        grad_sample_mode=mode,
    )
    private_model, optimizer = out[0], out[1]
    loss_fn = out[2] if len(out) == 4 else criterion("mlp", "sum")
    inputs, targets = (t.split(SPLIT)[rank] for t in batch())
    loss = loss_fn(private_model(inputs), targets)
    amp = scaler()
    amp.scale(loss * (1e38 if rank == bad_rank else 1.0)).backward()
    amp.step(optimizer)
    amp.update()

    def full(tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()

    grads = [None if p.grad is None else full(p.grad) for p in model.parameters()]
    parameters = [full(p.detach()) for p in model.parameters()]
    return {"grads": grads, "parameters": parameters, "steps": len(engine.accountant)}


RANKED = [
    ("ddp", "hooks", False),
    ("ddp", "ghost", False),
    ("ddp", "ghost_bk", False),
    ("fsdp", "ghost_fsdp", False),
    ("fsdp", "ghost_fsdp", True),
    ("fsdp", "ghost_fsdp_bk", True),
]


def all_rank_runs(rank: int, world: int) -> list[Any]:
    return [rank_run(rank, world, *c, bad) for c in RANKED for bad in (None, 1)]


def check_ranks(results: list[Any]) -> None:
    want, _ = oracle("mlp", *batch(), 0.5)
    untouched = [p.detach() for p in build("mlp").parameters()]
    for rank in results:
        for good, bad in zip(rank[::2], rank[1::2], strict=True):
            assert_close(good["grads"], want)
            assert good["steps"] == bad["steps"] == 1
            for p, b in zip(bad["parameters"], untouched, strict=True):
                torch.testing.assert_close(p, b, rtol=0, atol=0)


def test_two_ranks() -> None:
    check_ranks(run_distributed(all_rank_runs, 2))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    check_ranks(run_distributed(all_rank_runs, 2, backend="nccl"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_half_precision_on_a_gpu(mode: str, unscale: bool) -> None:
    """The usual fp16 recipe, from torch's default scale, which may overflow at first."""
    inputs, targets = (t.cuda() for t in batch())
    want, _ = oracle("mlp", *batch(), 0.5)
    model, optimizer, loss_fn = make(mode, 0.5)
    model.cuda()
    amp = torch.amp.GradScaler("cuda")
    for _ in range(20):
        optimizer.zero_grad()
        weights = [p.detach().clone() for p in trainable(model)]
        with torch.autocast("cuda", torch.float16):
            loss = loss_fn(model(inputs), targets)
        amp.scale(loss).backward()
        if unscale:
            amp.unscale_(optimizer)
        amp.step(optimizer)
        amp.update()
        moved = not torch.equal(weights[0], trainable(model)[0])
        for p, w in zip(trainable(model), weights, strict=True):
            p.data.copy_(w)
        if moved:
            break
    assert moved
    assert_close([p.grad.cpu() for p in trainable(model)], [w / B for w in want], tolerance=2e-2)
