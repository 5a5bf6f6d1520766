"""The trainers of torch_profile, and every failure that their users have met."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memory_test.torch_profile.model import (
    LARGE,
    SMALL,
    ProfiledTransformer,
    Shape,
    build_model,
    count_parameters,
)
from memory_test.torch_profile.trainers import TRAINERS, DPGhostClippingTrainer, Settings
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping, wrap_model
from opacus.layers import DPMultiheadAttention
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.validators import ModuleValidator

TINY = Shape(vocab=23, width=8, depth=2, heads=2, max_length=12)
B, T = 3, 10
PRIVATE = ("DPSGDTrainer", "DPGhostClippingTrainer")
CPU = torch.device("cpu")


def tiny_model():
    return build_model(TINY, CPU, torch.float64, seed=3)


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(TINY.vocab, (B, T), generator=generator)
    drawn[0] = drawn[0, 0]  # a sample with a much larger gradient
    return drawn


def trainer_of(name, model=None, **changes):
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "learning_rate": 1.0, **changes}
    return TRAINERS[name](model or tiny_model(), TINY.vocab, Settings(B, T, **options))


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def change_by(trainer, batch):
    before = vector(trainer.model).clone()
    trainer.step(batch)
    return vector(trainer.model) - before


def sample_gradients(model, batch):
    """One sample at a time, by plain autograd."""
    found = []
    for sample in batch:
        model.zero_grad()
        logits = model(sample[None])[0, :-1]
        nn.functional.cross_entropy(logits, sample[1:]).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    return torch.stack(found)


# --- the trainers do what they are called ---


def test_the_models_have_the_sizes_that_are_promised():
    with torch.device("meta"):
        assert 0.95e6 < count_parameters(ProfiledTransformer(SMALL)) < 1.25e6
        assert 0.95e9 < count_parameters(ProfiledTransformer(LARGE)) < 1.15e9


def test_the_standard_trainer_takes_the_mean_gradient():
    change = change_by(trainer_of("StandardTrainer"), tokens())
    expected = -sample_gradients(tiny_model(), tokens()).mean(0)
    torch.testing.assert_close(change, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_trainers_take_the_clipped_mean(name):
    grads = sample_gradients(tiny_model(), tokens())
    norms = grads.norm(dim=1)
    limit = float(norms.sort().values[1])  # one of three samples is clipped
    assert (norms > 1.01 * limit).sum() == 1
    change = change_by(trainer_of(name, max_grad_norm=limit), tokens())
    expected = -(grads * (limit / norms).clamp(max=1.0)[:, None]).mean(0)
    torch.testing.assert_close(change, expected, rtol=1e-5, atol=1e-8)
    assert not torch.allclose(expected, -grads.mean(0), rtol=1e-3)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_trainers_add_noise(name):
    quiet = change_by(trainer_of(name), tokens())
    noisy = change_by(trainer_of(name, noise_multiplier=2.0), tokens())
    assert (noisy - quiet).std().item() == pytest.approx(2.0 / B, rel=0.1)


@pytest.mark.parametrize("name", TRAINERS)
def test_steps_follow_each_other(name):
    trainer = trainer_of(name)
    losses = [trainer.step() for _ in range(3)]
    assert all(loss.isfinite() and not loss.requires_grad for loss in losses)
    assert len({float(loss) for loss in losses}) == 3  # new data each time


# --- what users have met ---


def test_per_sample_gradients_are_never_none():
    """``object of type 'NoneType' has no len()``: an optimizer found no per-sample gradients."""
    trainer = trainer_of("DPSGDTrainer")
    assert isinstance(trainer.model, GradSampleModule)
    assert type(trainer.optimizer) is DPOptimizer
    seen = []
    clip = trainer.optimizer.clip_and_accumulate

    def watched():
        seen.extend(p.grad_sample for p in trainer.optimizer.params)
        clip()

    trainer.optimizer.clip_and_accumulate = watched
    trainer.step(tokens())
    shapes = [(B, *p.shape) for p in trainer.model.parameters()]
    assert [tuple(g.shape) for g in seen] == shapes and len(seen) > 20


def test_an_optimizer_without_per_sample_gradients_says_so():
    model = tiny_model()
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=B,
    )
    model(tokens()).sum().backward()
    with pytest.raises(ValueError, match="gradient"):
        optimizer.step()


def test_the_model_has_no_attention_that_must_be_replaced():
    """``ShouldReplaceModuleError: We do not support nn.MultiheadAttention``."""
    model = tiny_model()
    kinds = [type(m) for m in model.modules()]
    assert kinds.count(DPMultiheadAttention) == TINY.depth
    assert not any(isinstance(m, nn.MultiheadAttention) for m in model.modules())
    assert ModuleValidator.validate(model, strict=False) == []
    # What the check is good for: torch's module is refused.
    assert ModuleValidator.validate(nn.MultiheadAttention(8, 2), strict=False)


def test_the_mode_is_given_to_wrap_model():
    """``GradSampleModule.__init__() got an unexpected keyword argument 'grad_sample_mode'``."""
    with pytest.raises(TypeError, match="grad_sample_mode"):
        GradSampleModule(tiny_model(), grad_sample_mode="ghost")
    wrapped = wrap_model(tiny_model(), grad_sample_mode="ghost", max_grad_norm=1.0)
    trainer = trainer_of("DPGhostClippingTrainer")
    assert type(trainer.model) is type(wrapped) is GradSampleModuleFastGradientClipping
    assert type(trainer.optimizer) is DPOptimizerFastGradientClipping


@pytest.mark.parametrize("name", TRAINERS)
def test_tokens_need_not_be_contiguous(name):
    """``view size is not compatible with input tensor's size and stride``."""
    scattered = tokens().t().contiguous().t()
    assert not scattered.is_contiguous()
    found = change_by(trainer_of(name), scattered)
    torch.testing.assert_close(found, change_by(trainer_of(name), tokens()))


class Scattered(nn.Module):
    """The same values in another memory layout."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        scattered = x.transpose(1, 2).contiguous().transpose(1, 2)
        self.seen.append(not scattered.is_contiguous())
        return scattered


@pytest.mark.parametrize("name", TRAINERS)
def test_activations_inside_need_not_be_contiguous(name):
    """The same error from inside the package, for activations and for backprops."""
    seen = []
    model = tiny_model()
    for block in model.layers:
        block.attention_norm = nn.Sequential(block.attention_norm, Scattered(seen))
        block.mlp = nn.Sequential(Scattered(seen), *block.mlp, Scattered(seen))
    model.norm = nn.Sequential(Scattered(seen), model.norm, Scattered(seen))
    found = change_by(trainer_of(name, model), tokens())
    assert len(seen) >= 3 * TINY.depth and all(seen)
    torch.testing.assert_close(found, change_by(trainer_of(name), tokens()))


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="12 positions"):
        tiny_model()(torch.zeros(1, 13, dtype=torch.long))


def test_ghost_norms_are_those_of_the_samples():
    trainer = trainer_of("DPGhostClippingTrainer")
    assert isinstance(trainer, DPGhostClippingTrainer)
    trainer.step(tokens())
    expected = sample_gradients(tiny_model(), tokens()).norm(dim=1)
    torch.testing.assert_close(
        trainer.model.per_sample_gradient_norms, expected, rtol=1e-8, atol=0, check_dtype=False
    )
