"""Peak memory of a rank.

Three moments can be the peak: the start of the backward pass, when all activations and the
logits are there; the end of a backward pass in which autograd forms gradients, when embedding and
head are reduced; and the clipped sum of what a single backward pass kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from opacus.scale.held import held_bytes
from opacus.scale.rates import Rates
from opacus.scale.run import OPTIMIZERS, Run

LOGIT_COPIES = 4  # logits, their log-softmax, its gradient, and that for the uncut sequence
BUCKET_BYTES = 4 << 27  # one bucket of the clipped sum in fp32
BUCKETS_IN_FLIGHT = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        state: Shards of parameters and of optimizer state, which always stay.
        moments: Peak at each moment, state included.
    """

    state: float
    moments: dict[str, float]

    @property
    def peak(self) -> float:
        """The largest."""
        return max(self.moments.values())

    @property
    def when(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=self.moments.__getitem__)


def memory_of(run: Run, rates: Rates) -> Memory:
    """Predict the peak memory of one rank."""
    parameters = run.shape.parameters / run.sharded_over
    state = parameters * (run.parameter_bytes + OPTIMIZERS[run.optimizer])
    moments = {"activations": state + _activations(run)}
    if run.strategy == "one_pass":
        moments["clipped sum"] = state + _clipped_sum(run, rates)
    else:
        moments["gradients"] = state + _gradients(run)
    return Memory(state, moments)


def _activations(run: Run) -> float:
    shape, tokens = run.shape, run.tokens_here
    each = shape.activation_bytes_of_block
    again = shape.layers * 2 * shape.hidden + each  # inputs of all blocks, and one block
    blocks = again if run.checkpointing else shape.layers * each
    logits = LOGIT_COPIES * shape.logit_bytes
    at_start = blocks + shape.last_bytes + logits
    if run.deferred and run.strategy == "two_pass":
        # The graph stays, and with it logits and log-softmax; all backprops wait.
        waiting = shape.layers * _backprops(run) + shape.logit_bytes
        kept = blocks + shape.last_bytes + 2 * shape.logit_bytes
        at_start = max(at_start, kept + waiting)
    return tokens * at_start + _unsharded(run)


def _backprops(run: Run) -> int:
    shape = run.shape
    return 2 * (3 * shape.hidden + 2 * shape.kv + 2 * shape.mlp)


def _unsharded(run: Run) -> float:
    """Parameters outside the blocks, and one block, in half precision."""
    if run.gpus == 1:
        return 0.0
    return 2.0 * (run.shape.root_parameters + run.shape.block_parameters)


def _gradients(run: Run) -> float:
    """All gradients are reduced but those outside the blocks, which are being so."""
    shape = run.shape
    logits = run.tokens_here * shape.logit_bytes
    if run.gpus == 1:
        return 2.0 * shape.parameters + logits
    blocks = shape.layers * shape.block_parameters
    reduced = 4 * blocks / run.sharded_over
    # Half precision gradients are copied into a padded fp32 buffer; the last block's is in flight.
    reducing = (2 + 4) * shape.root_parameters + 4 * shape.block_parameters
    # Between two passes the root is not resharded.
    kept = 2 * shape.root_parameters if run.strategy == "two_pass" else 0
    return reduced + reducing + kept + logits


def _clipped_sum(run: Run, rates: Rates) -> float:
    """What was kept is turned into shards; at the start all is kept, at the end all is summed."""
    shape = run.shape
    head = shape.vocab * shape.hidden
    held = held_bytes(run, rates)
    buckets = max(BUCKET_BYTES, 4 * head) + BUCKETS_IN_FLIGHT * BUCKET_BYTES
    summed = 4 * shape.parameters / run.sharded_over
    logits = run.tokens_here * shape.logit_bytes
    return max(held.total, summed + held.head) + buckets + logits
