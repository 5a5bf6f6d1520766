"""One record for each use of a layer and each backward pass of it, with that use's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from opacus.core.record.layers import layers_of
from opacus.core.record.record import Record
from opacus.core.record.recorder import Recorder


class Watched:
    """A model, its recorder, and the records that have come."""

    def __init__(self, model: nn.Module, **how: bool) -> None:
        self.model, self.records = model.double(), list[Record]()
        self.recorder = Recorder(model, layers_of(model), self.records.append, **how)

    @property
    def names(self) -> list[str]:
        return [record.spec.name for record in self.records]


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_records_come_in_the_order_of_the_backward_pass_and_are_its_tensors() -> None:
    watched, x = Watched(two_layers()), rows(5, 3)
    out = watched.model(x)
    assert watched.records == []
    weight = rows(5, 2)
    (out * weight).sum().backward()
    last, first = watched.records
    assert [last.spec.name, first.spec.name] == ["2", "0"]
    assert torch.equal(first.activations[0], x) and torch.equal(last.backprops, weight)
    hidden = torch.tanh(nn.functional.linear(x, *watched.model[0].parameters()))
    torch.testing.assert_close(last.activations[0], hidden)
    torch.testing.assert_close(
        first.backprops, (weight @ watched.model[2].weight) * (1 - hidden**2)
    )
    assert first.generation is last.generation and first.rows == last.batch == 5


def test_autograd_forms_no_gradient_of_a_tapped_parameter() -> None:
    watched = Watched(two_layers())
    watched.model(rows(5, 3)).sum().backward()
    assert len(watched.records) == 2
    assert all(p.grad is None for p in watched.model.parameters())


def test_each_use_and_each_backward_is_a_record() -> None:
    layer = nn.Linear(3, 3)
    watched = Watched(nn.Sequential(layer, nn.Tanh(), layer))
    out = watched.model(rows(4, 3)).sum()
    out.backward(retain_graph=True)
    assert watched.names == ["0", "0"] and all(record.reused for record in watched.records)
    out.backward()
    assert len(watched.records) == 4


def test_the_next_forward_pass_is_another_generation() -> None:
    watched = Watched(nn.Sequential(nn.Linear(3, 2)))
    for _ in range(2):
        watched.model(rows(4, 3)).sum().backward()
    together = watched.model(rows(4, 3)).sum() + watched.model(rows(4, 3)).sum()
    together.backward()
    one, two, three, four = (record.generation for record in watched.records)
    assert one is not two and three is four and two is not three


@pytest.mark.parametrize("how", ["eval", "no_grad", "paused", "disabled", "frozen", "removed"])
def test_what_is_not_to_be_recorded_is_not(how: str) -> None:
    watched, x = Watched(two_layers()), rows(5, 3).requires_grad_()
    if how == "eval":
        watched.model.eval()
    elif how == "frozen":
        watched.model.requires_grad_(False)
    elif how == "removed":
        watched.recorder.remove()
    elif how == "disabled":
        watched.recorder.enabled = False
    if how == "no_grad":
        with torch.no_grad():
            watched.model(x)
    elif how == "paused":
        with watched.recorder.paused():
            watched.model(x).sum().backward()
    else:
        watched.model(x).sum().backward()
    assert watched.records == [] and not watched.recorder.passes.generation.waiting


def test_a_frozen_parameter_is_left_out() -> None:
    watched = Watched(two_layers())
    watched.model[0].weight.requires_grad_(False)
    watched.model(rows(5, 3)).sum().backward()
    assert [record.spec.params for record in watched.records] == [("weight", "bias"), ("bias",)]


def test_removed_hooks_leave_the_model_as_it_was() -> None:
    watched = Watched(two_layers())
    modules = list(watched.model.modules())
    assert any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    watched.recorder.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    watched.model(rows(5, 3)).sum().backward()
    assert all(p.grad is not None for p in watched.model.parameters())


def test_samples_may_be_in_dimension_one() -> None:
    watched, x = Watched(nn.Sequential(nn.Linear(3, 2)), batch_first=False), rows(7, 5, 3)
    watched.model(x).sum().backward()
    (record,) = watched.records
    assert record.batch == 5 and torch.equal(record.activations[0], x.transpose(0, 1))


def test_an_empty_batch_is_a_record_without_rows() -> None:
    watched = Watched(two_layers())
    out = watched.model(rows(0, 3))
    assert out.shape == (0, 2)
    out.sum().backward()
    assert [(record.batch, record.rows) for record in watched.records] == [(0, 0)] * 2


def test_a_second_derivative_is_refused() -> None:
    watched, x = Watched(two_layers()), rows(5, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(watched.model(x).sum(), x, create_graph=True)
    assert watched.records == []


def test_records_go_where_they_are_sent() -> None:
    watched, other = Watched(two_layers()), list[Record]()
    out = watched.model(rows(5, 3)).sum()
    watched.recorder.send_to(other.append)
    out.backward()
    assert len(other) == 2 and watched.records == []
