"""The losses by example are the models' own, of each example alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.tiny import VOCABULARY, bert, llama

transformers = pytest.importorskip("transformers")

from opacus.integrations.transformers import losses  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

B, T = 5, 7


def tokens(low: int = 1, high: int = VOCABULARY) -> Tensor:
    return torch.randint(low, high, (B, T), generator=torch.Generator().manual_seed(7))


def partly(labels: Tensor) -> Tensor:
    """Other numbers of labelled tokens in each row, none in the last."""
    keep = torch.arange(T) < torch.tensor([[7], [3], [5], [2], [0]])
    return labels.masked_fill(~keep, -100)


def seq(**changes: Any) -> Any:
    return bert("BertForSequenceClassification", **changes)


CASES = {
    "causal": (llama, {"labels": partly(tokens())}),
    "masked": (lambda: bert("BertForMaskedLM"), {"labels": partly(tokens())}),
    "tags": (
        lambda: bert("BertForTokenClassification", num_labels=4),
        {"labels": partly(tokens(0, 4))},
    ),
    "classes": (lambda: seq(num_labels=4), {"labels": tokens(0, 4)[:, 0]}),
    "regression": (lambda: seq(num_labels=1), {"labels": torch.linspace(-1, 1, B)}),
    "several": (lambda: seq(num_labels=3), {"labels": (tokens(0, 2)[:, :3]).float()}),
    "answers": (
        lambda: bert("BertForQuestionAnswering"),
        {"start_positions": tokens(0, 9)[:, 0], "end_positions": tokens(0, 9)[:, 1]},
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_the_models_own(case: str) -> None:
    make, labels = CASES[case]
    model, ids = make().eval(), tokens()
    with torch.no_grad():
        outputs = dict(model(input_ids=ids).items())
        got = losses.loss_of(model)(outputs, {"input_ids": ids, **labels})
        alone = [
            model(input_ids=ids[i : i + 1], **{k: v[i : i + 1] for k, v in labels.items()}).loss
            for i in range(B)
        ]
    want = torch.stack([loss.reshape(()) for loss in alone]).nan_to_num(0.0)  # of no tokens: 0
    assert got.shape == (B,) and len(set(got.tolist())) > 2
    torch.testing.assert_close(got, want)
    none = losses.loss_of(model)(
        {k: v[:0] for k, v in outputs.items() if isinstance(v, Tensor)},
        {k: v[:0] for k, v in {"input_ids": ids, **labels}.items()},
    )
    assert none.shape == (0,)


def test_a_head_without_a_loss_of_ones_own() -> None:
    with pytest.raises(ValueError, match=r"no loss per example is known for BertForPreTraining"):
        losses.loss_of(bert("BertForPreTraining"))


@pytest.mark.parametrize("each", [False, True])
def test_a_function_written_for_trainer(each: bool) -> None:
    logits, labels = torch.randn(B, 3), torch.arange(B) % 3

    def function(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        reduction = "none" if each else "mean"
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction=reduction)

    want = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(
        losses.by_function(function, {"logits": logits}, {"labels": labels}), want
    )


@pytest.mark.parametrize("each", [False, True])
def test_a_function_divides_by_the_number_of_an_examples_own_labels(each: bool) -> None:
    """As transformers' own losses do by that of the whole batch."""
    logits, labels = torch.randn(B, 5, 3), torch.arange(B * 5).view(B, 5) % 3
    labels[1, 2:] = losses.IGNORED

    def function(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        each_token = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
        )
        return (each_token.sum(1) if each else each_token.sum()) / num_items_in_batch

    want = losses.causal_lm({"logits": logits}, {"labels": labels})
    got = losses.by_function(function, {"logits": logits}, {"labels": labels}, shifted=True)
    torch.testing.assert_close(got, want)


def test_an_output_that_is_not_given_is_named() -> None:
    outputs = losses.Outputs({"logits": torch.zeros(2, 3)})
    assert not hasattr(outputs, "hidden_states")
    with pytest.raises(AttributeError, match=r"hidden_states: .*\['logits'\].* model_outputs"):
        outputs.hidden_states  # noqa: B018
