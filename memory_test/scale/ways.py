"""Which blocks a single backward pass holds, sends to host memory or runs again, under a budget."""

from __future__ import annotations

from dataclasses import replace

from memory_test.scale.held import held_bytes
from memory_test.scale.memory import memory_of
from memory_test.scale.rates import Rates
from memory_test.scale.run import Run

# Of one card of a host, all cards copying: measured at 55 GB/s each way.
HOST_BYTES = 5.0e10
# How much longer a block that runs again takes than its work: its rows are weighted, compared with
# those that were measured, and copied. Fitted: 206 ms of the sum for 8 blocks more, 3B at 4x4096.
BESIDE_WORK = 1.16


def planned(run: Run, rates: Rates, budget: float, host: float = 0.0) -> Run:
    """The run with as many blocks held as the peak allows; the others as is faster.

    Args:
        run: With one backward pass; another one is returned as it is.
        rates: Of the card.
        budget: Bytes that the peak may take.
        host: Bytes of host memory for a rank.
    """
    if run.strategy != "one_pass":
        return run
    layers = run.shape.layers
    held = layers
    while held and memory_of(replace(run, held_blocks=held), rates).peak > budget:
        held -= 1
    chosen = replace(run, held_blocks=held)
    block = held_bytes(replace(run, held_blocks=layers), rates).blocks / layers
    if block / HOST_BYTES >= seconds_again(run, rates):
        return chosen
    return replace(chosen, offloaded_blocks=min(layers - held, int(host / block)))


def seconds_again(run: Run, rates: Rates) -> float:
    """Of one block that runs forward and backward once more, its parameters gathered."""
    shape = run.shape
    multiplied = (shape.multiplied - shape.vocab * shape.hidden) / shape.layers
    products = 3 * 2.0 * run.tokens_here * multiplied / rates.product_flops
    attention = 7.0 * run.tokens_here * run.tokens * shape.hidden / rates.attention_flops
    saved = run.tokens_here * shape.activation_bytes_of_block / rates.activation_bytes
    gathered = 0.0
    if run.sharded_over > 1:
        link = rates.link_bytes if run.sharded_over <= run.node else rates.network_bytes
        gathered = 2.0 * shape.block_parameters / link
    return BESIDE_WORK * (products + attention + saved) + gathered


def seconds_of_ways(run: Run, rates: Rates) -> dict[str, float]:
    """Time of the blocks that are not held, by way."""
    layers = run.shape.layers
    block = held_bytes(replace(run, held_blocks=layers), rates).blocks / layers
    again = run.replayed_blocks * seconds_again(run, rates)
    return {"copies": run.offloaded_blocks * block / HOST_BYTES, "again": again}
