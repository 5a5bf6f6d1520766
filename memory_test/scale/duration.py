"""Time of a step.

The host and the device run at the same time, and the slower one counts. On the device a
block computes while the next one communicates; what is outside the blocks does not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from memory_test.scale.held import held_bytes, norm_seconds
from memory_test.scale.rates import Rates
from memory_test.scale.run import Run
from memory_test.scale.shapes import linears
from memory_test.scale.ways import seconds_of_ways

# Attention, causal: forward 2 products of half the T x T, backward 5.
ATTENTION_FORWARD, ATTENTION_BACKWARD = 2, 5


@dataclass(frozen=True)
class Duration:
    """Seconds of a step.

    Attributes:
        host: Python and launches.
        device: Parts of the device's time that do not overlap.
        hidden: Communication that runs under computation.
    """

    host: float
    device: dict[str, float]
    hidden: float

    @property
    def step(self) -> float:
        """The whole step."""
        return max(self.host, sum(self.device.values()))

    @property
    def bound_by(self) -> str:
        """``"host"``, or the largest part of the device's time."""
        if self.host >= sum(self.device.values()):
            return "host"
        return max(self.device, key=self.device.__getitem__)


def duration_of(run: Run, rates: Rates) -> Duration:
    """Predict the time of one step."""
    parts = {
        "products": _products(run) / rates.product_flops,
        "attention": _attention(run) / rates.attention_flops,
        "elementwise": _elementwise(run) / rates.activation_bytes,
    }
    if run.fsdp:
        parts["parameters"] = _handled(run) / rates.fsdp_parameters
    else:  # the optimizer reads two tensors and writes one
        parts["parameters"] = 3.0 * run.parameter_bytes * run.shape.parameters / rates.stored_bytes
    if run.private:
        parts["clipping"] = _clipping(run, rates)
        parts |= {way: s for way, s in seconds_of_ways(run, rates).items() if s}
        parts["noise"] = run.shape.parameters / run.sharded_over / rates.noise_elements
    overlapped, exposed = _communication(run, rates)
    computed = sum(parts.values())
    parts["communication"] = exposed + max(0.0, overlapped - computed)
    return Duration(_host(run, rates), parts, min(overlapped, computed))


def _host(run: Run, rates: Rates) -> float:
    # FSDP2 does about half of the host's work of a block.
    share = 1.0 if run.fsdp else 0.4
    again = 4 / 3 if run.checkpointing else 1.0
    blocks = run.shape.layers + 1
    return rates.host_seconds_of_block * blocks * _host_ratio(run, rates) * share * again


def _host_ratio(run: Run, rates: Rates) -> float:
    if run.strategy == "two_pass":
        return rates.host_ratio_two_pass
    if run.strategy == "one_pass":
        flash = run.mode.startswith("flash")
        return rates.host_ratio_one_pass_flash if flash else rates.host_ratio_one_pass
    return 1.0


def _products(run: Run) -> float:
    """Operations: forward, gradients of inputs and of weights; what is computed again."""
    shape, tokens = run.shape, run.tokens_here
    once = 2.0 * tokens * shape.multiplied
    total = 3 * once
    if run.strategy == "two_pass":
        total += once  # gradients of inputs, a second time
    if run.checkpointing:
        passes = 2 if run.strategy == "two_pass" else 1
        total += passes * 2.0 * tokens * (shape.multiplied - shape.vocab * shape.hidden)
    return total


def _attention(run: Run) -> float:
    shape = run.shape
    unit = 1.0 * run.tokens_here * run.tokens * shape.hidden * shape.layers
    backward = 2 if run.strategy == "two_pass" else 1
    forward = 1 + (backward if run.checkpointing else 0)
    return unit * (forward * ATTENTION_FORWARD + backward * ATTENTION_BACKWARD)


def _elementwise(run: Run) -> float:
    """Saved bytes whose elementwise work a step does; a backward pass is two thirds of it."""
    shape = run.shape
    blocks = shape.layers * shape.activation_bytes_of_block
    outside = shape.last_bytes + 4 * shape.logit_bytes
    passes = 2 if run.strategy == "two_pass" else 1
    total = (1 + 2 * passes) / 3 * (blocks + outside)
    if run.checkpointing:
        total += passes / 3 * blocks
    return run.tokens_here * total


def _handled(run: Run) -> float:
    """Parameters that FSDP2 gathers twice, reduces and steps; once more for a second pass."""
    return run.shape.parameters * (1.3 if run.strategy == "two_pass" else 1.0)


def _clipping(run: Run, rates: Rates) -> float:
    if run.strategy == "one_pass":
        return held_bytes(run, rates).seconds
    shape = run.shape
    block = sum(norm_seconds(run, rates, d, p) for d, p in linears(shape))
    return shape.layers * block + norm_seconds(run, rates, shape.hidden, shape.vocab)


def _communication(run: Run, rates: Rates) -> tuple[float, float]:
    """Seconds that can run under computation, and that cannot."""
    if run.gpus == 1:
        return 0.0, 0.0
    shape, group = run.shape, run.sharded_over
    blocks, root = shape.layers * shape.block_parameters, shape.root_parameters
    link = rates.link_bytes if group <= run.node else rates.network_bytes
    share = (group - 1) / group
    gathers = 3 if run.strategy == "two_pass" else 2
    gathered = share * 2 * gathers * blocks / link
    reduced = share * 4 * blocks / link
    outside = share * (2 + 4) * root / link
    across = _across_replicas(run, rates)
    if run.strategy == "one_pass":  # the sum starts when all norms are known
        return gathered, reduced + outside + across
    return gathered + reduced, outside + across


def _across_replicas(run: Run, rates: Rates) -> float:
    """All-reduce of the shards over replicas (HSDP)."""
    replicas = run.gpus // run.sharded_over
    if replicas == 1:
        return 0.0
    link = rates.link_bytes if run.gpus <= run.node else rates.network_bytes
    size = 4 * run.shape.parameters / run.sharded_over
    return 2 * (replicas - 1) / replicas * size / link
