"""The counter-based generators give the words that were published for them."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from opacus.core.kernels.noise.chacha import chacha20
from opacus.core.kernels.noise.philox import philox

FULL = "ffffffff "
# Of the authors' Random123, kat_vectors: philox4x32 10: counter, key, words.
PHILOX = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (FULL * 4, FULL * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
# RFC 8439: key, then block counter and nonce, then the block, as bytes.
CHACHA = [
    (  # 2.3.2
        bytes(range(32)).hex(),
        "01000000 000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (  # A.1, test vector 1
        "00" * 32,
        "00000000 000000000000000000000000",
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (  # A.1, test vector 3
        "00" * 31 + "01",
        "01000000 000000000000000000000000",
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
]


def words(text: str) -> list[Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize("counter,key,want", PHILOX)
def test_philox(counter: str, key: str, want: str) -> None:
    got = philox(words(counter), words(key))
    assert [int(word[0]) for word in got] == [int(word, 16) for word in want.split()]


@pytest.mark.parametrize("key,counter,want", CHACHA)
def test_chacha20(key: str, counter: str, want: str) -> None:
    def columns(text: str) -> list[Tensor]:
        raw = bytes.fromhex(text)
        return [torch.tensor([word]) for word in struct.unpack(f"<{len(raw) // 4}I", raw)]

    got = chacha20(columns(counter), columns(key))
    assert struct.pack("<16I", *map(int, got)).hex() == want


@pytest.mark.parametrize("generator,keys", [(philox, 2), (chacha20, 8)])
def test_each_counter_by_itself(generator, keys: int) -> None:
    counters = [torch.arange(5) * (k + 1) for k in range(4)]
    key = [torch.full((1,), k) for k in range(keys)]
    together = torch.stack(generator(counters, key))
    for place in range(5):
        alone = generator([word[place : place + 1] for word in counters], key)
        assert torch.equal(torch.stack(alone)[:, 0], together[:, place])
    assert len(together.unique()) == together.numel()
