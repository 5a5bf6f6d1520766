from __future__ import annotations

import math

import pytest
import torch
from models import IGNORE
from reporting import Meter, table
from text_data import Texts
from training import EncodedTexts, Task, _parts, simple_baseline


class Letters:
    """a is 1, b is 2, ..."""

    vocab_size, pad, reversible = 5, 0, True

    def encode(self, text):
        return [ord(letter) - 96 for letter in text]


def encoded(texts, labels=None, length=10):
    return EncodedTexts(Texts(texts, labels or [0] * len(texts)), Letters(), length)


def test_texts_are_cut_to_the_length():
    data = encoded(["abcd", "ab"], [1, 0], length=3)
    assert [row[:2] for row in data.rows] == [([1, 2, 3], 1), ([1, 2], 0)]


def test_a_language_model_predicts_the_next_token_and_no_padding():
    tokens, mask, targets = Task.of("lm", pad=0).collate(encoded(["abc", "ab"]).rows)
    assert tokens.tolist() == [[1, 2], [1, 0]]
    assert mask.tolist() == [[1, 1], [1, 0]]
    assert targets.tolist() == [[2, 3], [2, IGNORE]]


def test_a_classifier_predicts_the_label():
    tokens, mask, targets = Task.of("classify", pad=0).collate(encoded(["ab", "c"], [1, 0]).rows)
    assert tokens.tolist() == [[1, 2], [3, 0]]
    assert mask.tolist() == [[1, 1], [1, 0]]
    assert targets.tolist() == [1, 0]


def test_accuracy_and_perplexity():
    classify, lm = Task.of("classify", 0), Task.of("lm", 0)
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    assert classify.score(logits, torch.tensor([0, 0, 0])) == (2.0, 3)
    assert classify.result(2.0, 3) == pytest.approx(2 / 3)
    # A model that knows nothing has as much perplexity as there are tokens.
    total, count = lm.score(torch.zeros(1, 3, 5), torch.tensor([[1, 4, IGNORE]]))
    assert count == 2
    assert lm.result(total, count) == pytest.approx(5)


def test_parts_of_a_batch_weigh_as_many_samples_as_they_hold():
    batch = tuple(torch.arange(7) for _ in range(3))
    parts = list(_parts(batch, 3))
    assert torch.cat([part[0] for part, _ in parts]).equal(batch[0])
    assert [weight for _, weight in parts] == pytest.approx([3 / 7, 3 / 7, 1 / 7])


def test_the_majority_class_is_that_of_the_test_rows():
    test = encoded(["a"] * 5, [0, 1, 1, 1, 0])
    assert simple_baseline(Task.of("classify", 0), test, test, 5) == pytest.approx(0.6)


def test_token_frequencies_are_those_of_the_training_rows():
    train, test = encoded(["abb", "ab"]), encoded(["aba", "ac"])
    # Predicted in training: b, b, b. Plus one each of 5 tokens: b 4/8, the others 1/8.
    expected = (math.log(2) + 2 * math.log(8)) / 3  # of b, a, c
    assert simple_baseline(Task.of("lm", 0), train, test, 5) == pytest.approx(math.exp(expected))


def test_the_mean_loss_is_over_samples_and_ignores_empty_batches():
    meter = Meter()
    meter.add(1.0, samples=3, tokens=30)
    meter.add(5.0, samples=1, tokens=10)
    meter.add(math.nan, samples=0, tokens=0)
    assert meter.here[0] == pytest.approx(2.0)


def test_a_table_is_aligned():
    assert (
        table(("", "score"), [("a", "1"), ("long", "22")])
        == "      score\na         1\nlong     22"
    )
