from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tokenizer
import torch
from tokenizer import PAD, make_tokenizer, pad_right

TEXT = "It's naïve, isn't it? 一 film"


@pytest.mark.parametrize("kind", ["words", "bytes", "bpe"])
@pytest.mark.parametrize("text", [TEXT, "x", "?", "\x00"])
def test_numbers_are_in_the_vocabulary_and_none_is_padding(kind, text):
    made = make_tokenizer(kind, [TEXT] * 3)
    numbers = made.encode(text)
    assert numbers, "a text without tokens could be no sample"
    assert all(0 <= number < made.vocab_size and number != PAD for number in numbers)


def test_bytes_can_be_read_back():
    numbers = make_tokenizer("bytes", []).encode(TEXT)
    assert bytes(number - 3 for number in numbers[1:-1]).decode() == TEXT


def test_words_ignore_case_and_separate_punctuation():
    encode = make_tokenizer("words", []).encode
    assert encode("Good, GOOD!") == [*encode("good"), *encode(","), *encode("good"), *encode("!")]
    assert encode("good") != encode("bad")


def test_hashes_are_equal_in_another_process():
    code = f"import tokenizer; print(tokenizer.make_tokenizer('words', []).encode({TEXT!r}))"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(tokenizer.__file__).parent), "PYTHONHASHSEED": "7"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert told.strip() == str(make_tokenizer("words", []).encode(TEXT))


@pytest.mark.parametrize(("kind", "says"), [("model", "folder"), ("letters", "one of")])
def test_what_cannot_be_made_is_refused(kind, says):
    with pytest.raises(ValueError, match=f"--tokenizer .*{says}"):
        make_tokenizer(kind, [TEXT])


def test_padding_is_right_of_the_tokens_and_masked():
    tokens, mask = pad_right([[5], [6, 7, 8]], pad=0)
    assert tokens.equal(torch.tensor([[5, 0, 0], [6, 7, 8]]))
    assert mask.equal(torch.tensor([[1, 0, 0], [1, 1, 1]]))
