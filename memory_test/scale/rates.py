"""Measured speeds of cards and links, from ``rates.json``; there with the source of each."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("rates.json")


@dataclass(frozen=True)
class Rates:
    """Speeds of one card in a host; ``rates.json`` says where each comes from.

    Attributes:
        memory_bytes: Memory that can be allocated.
        product_flops: Floating-point operations a second of a step's matrix products.
        attention_flops: The same of causal attention.
        norm_flops: The same of norms that form no per-sample gradient.
        activation_bytes: Bytes of saved activations a second, for all elementwise work on them.
        stored_bytes: Bytes a second of per-sample gradients or kept tensors, each pass.
        fsdp_parameters: Parameters a second that FSDP2 casts, copies and steps, whatever W is.
        noise_elements: Elements of noise a second, added to the shard.
        link_bytes: Bytes a second that a rank receives from ranks of its host.
        network_bytes: The same from other hosts.
        host_seconds_of_block: Time that Python and launches take for a block, non-private.
        host_ratio_one_pass: How much more Python a step takes with one backward pass.
        host_ratio_one_pass_flash: The same where Triton kernels compute the norms.
        host_ratio_two_pass: The same with two backward passes, whatever computes the norms.
    """

    memory_bytes: float
    product_flops: float
    attention_flops: float
    norm_flops: float
    activation_bytes: float
    stored_bytes: float
    fsdp_parameters: float
    noise_elements: float
    link_bytes: float
    network_bytes: float
    host_seconds_of_block: float
    host_ratio_one_pass: float
    host_ratio_one_pass_flash: float
    host_ratio_two_pass: float


@functools.cache
def read() -> Mapping[str, Any]:
    """The content of the file: ``{card: {name: {"value", "source"}}}``."""
    found: Mapping[str, Any] = json.loads(FILE.read_text())["cards"]
    return found


def rates_of(card: str) -> Rates:
    """Rates of ``"h100"`` or ``"h200"``.

    Raises:
        ValueError: That card was not measured.
    """
    cards = read()
    if card not in cards:
        raise ValueError(f"card must be one of {', '.join(cards)}, got {card!r}")
    return Rates(**{f.name: float(cards[card][f.name]["value"]) for f in fields(Rates)})
