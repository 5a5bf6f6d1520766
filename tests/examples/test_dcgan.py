"""Two networks, of which one is private: what is clipped, what is learned from, a whole run."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("sklearn")

import dcgan_digits as script
from classifier import MODES
from digits import load_digits
from runtime import Runtime

CPU = Runtime(0, 1, torch.device("cpu"))
CLIP = 0.05


def trainer(mode: str) -> script.Trainer:
    torch.manual_seed(0)
    args = argparse.Namespace(
        epsilon=8.0, delta=1e-4, epochs=1, batch_size=256, lr=1.0, max_grad_norm=CLIP,
        grad_sample_mode=mode, generator_lr=1e-3, decay=0.9,
    )  # fmt: skip
    made = script.Trainer(args, load_digits().train, CPU)
    made.private.optimizer.noise_multiplier = 0.0
    return made


def clipped_pairs(model, real, drawn, labels):
    """Sum over pairs of the clipped gradient of both losses, one pair at a time."""
    parameters = list(model.parameters())
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for i in range(len(labels)):
        one = slice(i, i + 1)
        logit = model(real[one], labels[one]), model(drawn[one], labels[one])
        loss = F.softplus(-logit[0]) + F.softplus(logit[1])
        gradient = torch.autograd.grad(loss.sum(), parameters)
        norms.append(torch.cat([g.flatten() for g in gradient]).norm())
        factor = min(1.0, CLIP / (float(norms[-1]) + 1e-6))
        total = [t + factor * g for t, g in zip(total, gradient, strict=True)]
    return total, torch.stack(norms)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_a_pair_is_clipped(mode):
    made = trainer(mode)
    plain = script.Discriminator()
    before = [p.detach().clone() for p in made.private.model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), before, strict=True):
            parameter.copy_(value)
    images, labels = (tensor[:6] for tensor in load_digits().train.tensors)
    torch.manual_seed(1)
    with torch.no_grad():
        drawn = made.generator.draw(labels)
    want, norms = clipped_pairs(plain, images, drawn, labels)
    assert (norms > CLIP).any()
    torch.manual_seed(1)
    made._discriminator_step(images, labels)
    batch = made.private.optimizer.expected_batch_size
    for parameter, old, total in zip(made.private.model.parameters(), before, want, strict=True):
        torch.testing.assert_close((old - parameter) * batch, total, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_generators_step_leaves_the_discriminator_alone(mode):
    made = trainer(mode)
    judge = made.private.model
    before = [p.detach().clone() for p in judge.parameters()]
    old = [p.detach().clone() for p in made.generator.parameters()]
    made._generator_step()
    assert all(torch.equal(p, b) for p, b in zip(judge.parameters(), before, strict=True))
    assert all(p.grad is None or not p.grad.any() for p in judge.parameters())
    assert all(p.requires_grad for p in judge.parameters())
    assert not made.private.engine.accountant.history
    assert all(not torch.equal(p, b) for p, b in zip(made.generator.parameters(), old, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_is_a_step(mode):
    made = trainer(mode)
    images, labels = (tensor[:0] for tensor in load_digits().train.tensors)
    before = [p.detach().clone() for p in made.private.model.parameters()]
    made.step(images, labels)
    after = made.private.model.parameters()
    assert all(torch.equal(p, b) for p, b in zip(after, before, strict=True))
    assert [steps for _, _, steps in made.private.engine.accountant.history] == [1]


@pytest.mark.slow
def test_what_the_docstring_promises(tmp_path, capsys):
    sheet = tmp_path / "drawn.png"
    outcome = script.main(["--seed", "0", "--images", str(sheet)])
    assert outcome.accuracy > 0.7
    assert 9.9 < outcome.epsilon <= 10.0
    assert f"{outcome.accuracy:.1%} at epsilon 9.99" in capsys.readouterr().out.splitlines()[-1]
    assert sheet.stat().st_size > 0


def test_an_untrained_generator_would_fail():
    torch.manual_seed(0)
    drawn = script.draw(script.Generator(), 500, CPU)
    assert script.score(drawn, load_digits().test, CPU) < 0.4
