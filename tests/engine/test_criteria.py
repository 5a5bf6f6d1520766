"""Criteria whose mean is more than the mean of unreduced losses mean the same in ghost modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.step.losses import per_sample_losses
from tests.helpers import oracle

B, T, CLIP = 5, 9, 0.05
GHOST = ["ghost", "ghost_bk"]


def train(net: nn.Module, mode: str, criterion: Any, loss_of: Any, inputs: Tensor) -> Any:
    """The loss, and the error of the step's gradients against one sample at a time."""
    plain = type(criterion)(reduction="mean") if isinstance(criterion, nn.CTCLoss) else criterion

    def alone(model: nn.Module, sample: Any) -> Tensor:
        place = int(sample[1])
        return loss_of(plain, model(sample[0]), slice(place, place + 1))  # type: ignore[no-any-return]

    places = torch.arange(len(inputs))
    sums = oracle.per_sample_gradients(net, alone, (inputs, places))
    norms = (
        torch.stack([g.double().flatten(1).square().sum(1) for g in sums.values()]).sum(0).sqrt()
    )
    assert norms.min() > CLIP
    value = sum(alone(net, (inputs[i : i + 1], places[i])).item() for i in range(len(inputs)))
    net.zero_grad(set_to_none=True)
    model, optimizer, private, _ = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(inputs), batch_size=len(inputs)),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    loss = loss_of(private, model(inputs), slice(None))
    loss.backward()
    optimizer.step()
    expected = oracle.clipped_sum(sums, CLIP)
    for parameter, total in zip(net.parameters(), expected.values(), strict=True):
        torch.testing.assert_close(
            parameter.grad.double(), total / len(inputs), rtol=1e-4, atol=1e-7
        )
    assert loss.item() == pytest.approx(value / len(inputs), rel=1e-5)


@pytest.mark.parametrize("mode", GHOST)
def test_batchmean(mode: str) -> None:
    torch.manual_seed(0)
    targets = torch.rand(B, 4).softmax(1)

    def loss_of(criterion: Any, output: Tensor, rows: slice) -> Any:
        return criterion(output.log_softmax(1), targets[rows])

    criterion = nn.KLDivLoss(reduction="batchmean")
    train(nn.Linear(6, 4), mode, criterion, loss_of, torch.randn(B, 6) * 3)
    assert criterion.reduction == "batchmean"


def test_batchmean_is_no_sum() -> None:
    net = nn.Linear(6, 4)
    with pytest.raises(ValueError, match="loss_reduction must be 'mean' or 'sum' and the same"):
        PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
            criterion=nn.KLDivLoss(reduction="batchmean"),
            data_loader=DataLoader(TensorDataset(torch.zeros(4, 6)), batch_size=4),
            noise_multiplier=0.0,
            max_grad_norm=CLIP,
            loss_reduction="sum",
            grad_sample_mode="ghost",
        )


@pytest.mark.parametrize("time", [T, B])
@pytest.mark.parametrize("criterion", [nn.CTCLoss(), functional.ctc_loss])
@pytest.mark.parametrize("mode", GHOST)
def test_ctc_divides_by_the_length_of_the_target(mode: str, criterion: Any, time: int) -> None:
    torch.manual_seed(0)
    targets, lengths = torch.randint(1, 4, (B, 2)), torch.tensor([1, 2, 2, 1, 2])

    def loss_of(criterion: Any, output: Tensor, rows: slice) -> Any:
        given = torch.full((len(output),), time)
        logs = output.log_softmax(2).transpose(0, 1)
        return criterion(logs, targets[rows], given, lengths[rows])

    train(nn.Linear(6, 4), mode, criterion, loss_of, torch.randn(B, time, 6) * 3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_for_each_token_of_no_samples(reduction: str) -> None:
    losses = per_sample_losses(
        torch.zeros(0, T),
        rows=0,
        samples=0,
        targets=torch.zeros(0, T, dtype=torch.long),
        ignore_index=-100,
        reduction=reduction,
    )
    assert losses.shape == (0,)


SHAPES: dict[Any, tuple[type[Exception], str]] = {
    (4, T, 3): (ValueError, r"shape=\(4, 9, 3\) says that there are 4 samples"),
    (0, T): (ValueError, "says that there are 0 samples"),
    (-B, T): (ValueError, "says that there are -5 samples"),
    (): (TypeError, r"shape must be .*\(batch, length, classes\), got \(\)"),
    B: (TypeError, "got 5"),
    (2.5, T): (TypeError, r"got \(2.5, 9\)"),
    (T, B, 3): (ValueError, r"correct criterion\(..., shape=\)"),  # divides the losses
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", GHOST)
def test_a_wrong_shape_is_named(mode: str, shape: Any) -> None:
    torch.manual_seed(0)
    net, inputs, targets = nn.Linear(6, 3), torch.randn(B, T, 6), torch.randint(3, (B, T))
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    kind, message = SHAPES[shape]
    with pytest.raises(kind, match=message):
        criterion(model(inputs).flatten(0, 1), targets.flatten(), shape=shape).backward()
    optimizer.zero_grad()
    logits = model(inputs)
    criterion(logits.flatten(0, 1), targets.flatten(), shape=logits.shape).backward()
    optimizer.step()


class OwnLoss(nn.CrossEntropyLoss):
    """What torch.compile looks into: it leaves losses of torch as they are."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) * 2.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("criterion", [OwnLoss(), functional.cross_entropy])
@pytest.mark.parametrize("mode", GHOST)
def test_a_criterion_is_compiled(mode: str, criterion: Any) -> None:
    torch.manual_seed(0)
    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def loss_of(loss: Any, output: Tensor, rows: slice) -> Tensor:
        if hasattr(loss, "module"):
            loss.compile(backend=backend)
        return loss(output, targets[rows])  # type: ignore[no-any-return]

    inputs, targets = torch.randn(B, 4) * 3, torch.randint(0, 3, (B,))
    train(nn.Linear(4, 3), mode, copy.copy(criterion), loss_of, inputs)
    assert graphs
