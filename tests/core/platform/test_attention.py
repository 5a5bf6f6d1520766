"""Which attention a private model's forward passes may take: cuDNN plans for each new size."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import GradSampleModule, PrivacyEngine
from opacus.core.platform import attention


@pytest.fixture(autouse=True)
def _few_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "AT_ONCE", 2)
    monkeypatch.setattr(attention, "OFTEN", 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert cudnn_sdp_enabled()
    yield
    assert cudnn_sdp_enabled()


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2), [True]
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(cudnn_sdp_enabled())
        if self.fails:
            raise KeyError
        return self.layer(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def step(model: nn.Module, batch: int) -> bool:
    """Whether cuDNN may be taken in the forward pass, and by a checkpoint in the backward pass."""
    loss = model(torch.randn(batch, 2)).sum()
    inside = cudnn_sdp_enabled()
    loss.backward()
    for p in model.parameters():
        p.grad_sample = p.grad = None
    assert inside == cudnn_sdp_enabled() == model._module.seen[-1]
    return inside


def test_sizes_that_come_again() -> None:
    model = GradSampleModule(Seen())
    assert [step(model, n) for n in (5, 6, 7, 5, 8, 7, 6, 7, 8)] == [
        True, True, False, True, False, False, True, True, False,
    ]  # fmt: skip
    model.remove_hooks()


def test_outside_of_training_all_is_as_it_was() -> None:
    model = GradSampleModule(Seen())
    assert [step(model, n) for n in (5, 6, 7)] == [True, True, False]
    model.eval()(torch.randn(9, 2))
    assert model._module.seen[-1] and cudnn_sdp_enabled()
    assert not step(model.train(), 8)
    assert copy.deepcopy(model) is not None
    model.remove_hooks()


def test_several_forward_passes_before_one_backward_pass() -> None:
    """A checkpoint of the first may run again after the second one began."""
    model = GradSampleModule(Seen())
    for n in (5, 6):
        step(model, n)
    one = model(torch.randn(5, 2)).sum()
    other = model(torch.randn(7, 2)).sum()
    assert model._module.seen[-2:] == [True, True] and cudnn_sdp_enabled()
    del one, other
    model.remove_hooks()


def test_what_is_switched_off_stays_off() -> None:
    model = GradSampleModule(Seen())
    enable_cudnn_sdp(False)
    try:
        assert not any(step(model, n) for n in (5, 6, 7, 5))
        model.remove_hooks()
        assert not cudnn_sdp_enabled()
    finally:
        enable_cudnn_sdp(True)


def without_plan(size: int = 7) -> GradSampleModule:
    """A model that has taken cuDNN out for its latest forward pass."""
    model = GradSampleModule(Seen())
    assert [step(model, n) for n in (5, 6, size)] == [True, True, False]
    return model


def ended(*models: GradSampleModule) -> None:
    """As an optimizer's step says it."""
    for model in models:
        model._recorder.attention.give_back()


def test_a_model_that_is_gone_leaves_nothing() -> None:
    model = without_plan()
    twin = copy.deepcopy(model)
    del twin
    gc.collect()
    assert not cudnn_sdp_enabled()
    del model
    gc.collect()
    assert cudnn_sdp_enabled()


def test_a_forward_pass_that_fails_leaves_nothing() -> None:
    model = without_plan()
    model._module.fails = True
    with pytest.raises(KeyError):
        model(torch.randn(9, 2))
    assert not model._module.seen[-1] and cudnn_sdp_enabled()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_after_the_step_all_is_as_it_was(mode: str) -> None:
    module = Seen()
    model, optimizer, *rest, _ = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(64)), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    criterion = rest[0] if rest else nn.CrossEntropyLoss()

    def train(n: int) -> bool:
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(n, 2)), torch.zeros(n, dtype=torch.long))
        inside = module.seen[-1]
        loss.backward()
        assert module.seen[-1] == inside
        optimizer.step()
        return inside

    assert [train(n) for n in (5, 6, 7)] == [True, True, False]
    assert cudnn_sdp_enabled()
    enable_cudnn_sdp(False)  # the user's word between steps counts
    try:
        assert not train(5) and not cudnn_sdp_enabled()
    finally:
        enable_cudnn_sdp(True)


@pytest.mark.parametrize(
    "chosen", [[SDPBackend.CUDNN_ATTENTION], [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]]
)
def test_who_chooses_kernels_gets_them(chosen: list[SDPBackend]) -> None:
    model = without_plan()
    ended(model)
    with sdpa_kernel(chosen):
        assert step(model, 9)
    model.remove_hooks()


def test_what_a_model_has_met_stays_until_its_backward_pass() -> None:
    """Whichever other model begins, or ends, meanwhile."""
    models = []
    for _ in range(2):
        models.append(without_plan())
        ended(*models)
    one, other = models
    planned = one(torch.randn(5, 2)).sum()
    assert cudnn_sdp_enabled()
    fresh = other(torch.randn(9, 2)).sum()
    assert cudnn_sdp_enabled() and other._module.seen[-1]  # else `one` would run again without
    planned.backward(), fresh.backward()
    ended(one, other)
    first = one(torch.randn(9, 2)).sum()
    second = other(torch.randn(5, 2)).sum()
    first.backward()
    ended(one)
    assert not other._module.seen[-1] and not cudnn_sdp_enabled()
    second.backward()
    for model in (one, other):
        model.remove_hooks()


def test_a_checkpoint_that_ends_early_leaves_the_choice_to_others() -> None:
    """It stops the model by an exception once it has what the backward pass needs."""
    model = without_plan()
    loss = checkpoint(model, torch.randn(9, 2), use_reentrant=False).sum()
    assert not model._module.seen[-1]
    loss.backward()
    assert model._module.seen[-2:] == [False, False] and not cudnn_sdp_enabled()
    model.remove_hooks()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's
def test_compiled_parts_take_it_for_one_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their choice is made as they are traced, and the second size is traced as any size.
    seen = Seen()
    seen.layer = Block()  # type: ignore[assignment]
    model = GradSampleModule(seen)
    with monkeypatch.context() as patched:  # the compiler would ask for a GPU
        patched.setattr(torch.cuda, "is_initialized", lambda: False)
        seen.layer.compile(backend="aot_eager")
        step(model, 4)
    assert [step(model, n) for n in (5, 6, 5, 7)] == [True, False, True, False]
    model.remove_hooks()
