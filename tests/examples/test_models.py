from __future__ import annotations

import pytest
import torch
from models import IGNORE, SHAPES, SampleCrossEntropy, build_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModule

VOCABULARY, CLASSES = 30, 3


def tiny(task):
    torch.manual_seed(0)
    return build_model("tiny", task=task, vocab_size=VOCABULARY, classes=CLASSES)


def batch(samples, length=5):
    """Right-padded tokens, their mask."""
    lengths = torch.arange(samples) % length + 1
    mask = (torch.arange(length) < lengths[:, None]).long()
    return torch.randint(1, VOCABULARY, (samples, length)) * mask, mask


def loss_of(task, model, tokens, mask):
    return SampleCrossEntropy()(model(tokens, mask), targets_of(task, tokens, mask))


def targets_of(task, tokens, mask):
    return tokens[:, 0] % CLASSES if task == "classify" else tokens.masked_fill(mask == 0, IGNORE)


@pytest.mark.parametrize("task", ["classify", "lm"])
def test_each_parameter_has_the_per_sample_gradient_of_autograd(task):
    model, (tokens, mask) = tiny(task), batch(4)
    one_by_one = []
    for index in range(4):
        loss = loss_of(task, model, tokens[index : index + 1], mask[index : index + 1])
        one_by_one.append(torch.autograd.grad(loss, list(model.parameters())))
    wrapped = GradSampleModule(model)
    loss_of(task, wrapped, tokens, mask).backward()
    for (name, parameter), *expected in zip(model.named_parameters(), *one_by_one, strict=True):
        torch.testing.assert_close(
            parameter.grad_sample,
            torch.stack(expected),
            rtol=1e-4,
            atol=1e-6,
            msg=lambda m, name=name: f"{name}: {m}",
        )
    wrapped.cleanup()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("task", ["classify", "lm"])
def test_an_empty_batch_moves_nothing(task, mode):
    model, (tokens, mask) = tiny(task), batch(8)
    targets = targets_of(task, tokens, mask)
    criterion = SampleCrossEntropy()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(tokens, mask, targets), batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    private, optimizer, criterion = made[0], made[1], made[2] if len(made) == 4 else criterion

    def moved_by(*batch):
        before = [p.detach().clone() for p in model.parameters()]
        tokens, mask, targets = batch
        optimizer.zero_grad()
        criterion(private(tokens, mask), targets).backward()
        optimizer.step()
        return [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]

    assert all(moved_by(tokens, mask, targets))
    assert not any(moved_by(tokens[:0], mask[:0], targets[:0]))


@pytest.mark.parametrize("task", ["classify", "lm"])
def test_padding_does_not_change_a_sample(task):
    model, (tokens, mask) = tiny(task), batch(4)
    longer = [nn.functional.pad(t, (0, 3)) for t in (tokens, mask)]
    torch.testing.assert_close(
        loss_of(task, model, tokens, mask), loss_of(task, model, *longer), rtol=1e-5, atol=1e-6
    )


def test_the_loss_of_a_sequence_is_the_mean_over_its_own_tokens():
    logits, targets = torch.randn(3, 4, 7), torch.randint(0, 7, (3, 4))
    targets[1, 2:], targets[2, :] = IGNORE, IGNORE
    expected = [
        nn.functional.cross_entropy(logits[0], targets[0]),
        nn.functional.cross_entropy(logits[1, :2], targets[1, :2]),
        torch.tensor(0.0),
    ]
    torch.testing.assert_close(SampleCrossEntropy("none")(logits, targets), torch.stack(expected))
    torch.testing.assert_close(SampleCrossEntropy()(logits, targets), sum(expected) / 3)


def test_the_loss_of_classes_is_cross_entropy():
    logits, targets = torch.randn(5, 3), torch.randint(0, 3, (5,))
    for reduction in ("none", "mean"):
        torch.testing.assert_close(
            SampleCrossEntropy(reduction)(logits, targets),
            nn.functional.cross_entropy(logits, targets, reduction=reduction),
        )


@pytest.mark.parametrize("task", ["classify", "lm"])
def test_a_local_folder_gives_its_weights(tmp_path, task):
    saved = tiny(task)
    inner = saved.backbone if task == "classify" else saved.model
    inner.save_pretrained(tmp_path)
    loaded = build_model(str(tmp_path), task=task, vocab_size=VOCABULARY, classes=CLASSES)
    again = loaded.backbone if task == "classify" else loaded.model
    for (name, a), (_, b) in zip(inner.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert loaded.training


def test_a_folder_with_a_configuration_only_gives_random_weights(tmp_path):
    tiny("lm").model.config.save_pretrained(tmp_path)
    model = build_model(str(tmp_path), task="lm", vocab_size=VOCABULARY, classes=0)
    assert model.model.config.hidden_size == SHAPES["tiny"]["hidden_size"]


def test_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--model .*tiny, small.*config\.json"):
        build_model(str(tmp_path), task="lm", vocab_size=VOCABULARY, classes=0)


def test_a_damaged_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"--model .*cannot be read"):
        build_model(str(tmp_path), task="lm", vocab_size=VOCABULARY, classes=0)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    tiny("lm").model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"--model .*30 tokens.*--tokenizer"):
        build_model(str(tmp_path), task="lm", vocab_size=VOCABULARY + 1, classes=0)
