"""Uses of one layer are joined, and nothing of a failed backward pass stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from opacus import GradSampleModule
from opacus.core.rules import LinearRule


class Repeats(nn.Module):
    """One linear layer, used ``times`` times."""

    def __init__(self, times: int, fail: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.times = times
        self.fail = fail

    def forward(self, x: Tensor) -> Tensor:
        for step in range(self.times):
            x = torch.tanh(self.layer(x))
            if self.fail and step == 0:
                x.register_hook(_break)
        return x


def _break(grad: Tensor) -> None:
    raise RuntimeError("broken on purpose")


def alone(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of one sample at a time."""
    rows = [torch.autograd.grad(model(row[None]).sum(), list(model.parameters())) for row in x]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


@pytest.mark.parametrize("share", [0.0, 2.0, 1e9])
def test_uses_are_joined_and_exact(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opacus.core.sums.materialise.WAITING_SHARE", share)
    calls = []
    formed = LinearRule.per_sample_grad
    monkeypatch.setattr(
        LinearRule, "per_sample_grad", lambda *args: calls.append(1) or formed(*args)
    )
    model, x = Repeats(12).double(), torch.randn(4, 3, dtype=torch.float64)
    want = alone(model, x)
    private = GradSampleModule(model, loss_reduction="sum")
    private(x).sum().backward()
    for parameter, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad_sample, grad)
    assert len(calls) == {0.0: 12, 1e9: 1}.get(share, len(calls))
    assert len(calls) <= 12


def test_a_failed_backward_leaves_nothing() -> None:
    model = Repeats(3, fail=True).double()
    private = GradSampleModule(model, loss_reduction="sum")
    loss = private(torch.randn(4, 3, dtype=torch.float64)).sum()
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    del loss
    private.zero_grad()
    model.fail = False
    x = torch.randn(4, 3, dtype=torch.float64)
    want = alone(model.eval(), x)
    model.train()
    private(x).sum().backward()
    for parameter, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad_sample, grad)


class Overwrites(nn.Module):
    """One layer, used twice; its second input is overwritten once the backward has come by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) + 0.0

        def overwrite(grad: Tensor) -> None:
            with torch.no_grad():
                hidden.zero_()

        hidden.register_hook(overwrite)
        return self.layer(hidden)


def test_a_use_that_waits_and_is_overwritten_is_refused() -> None:
    private = GradSampleModule(Overwrites(), loss_reduction="sum")
    with pytest.raises(RuntimeError, match=r"layer 'layer' .* was changed in place after"):
        private(torch.randn(4, 3)).sum().backward()
    assert all(getattr(p, "grad_sample", None) is None for p in private.parameters())
