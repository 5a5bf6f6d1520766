"""Peak memory of a rank.

Some moments can be the peak: the gradient of the loss, when all activations and copies of the
logits are there; the backward pass of the last block, which is computed again before it where
activations are checkpointed, when the logits are gone; the end of a backward pass in which autograd
forms gradients, when embedding and head are reduced; with a single backward pass that of the first
block, when all that is kept is there; then the clipped sum, which goes from the last parameter to
the first: its beginning, and the blocks that run again.
"""

from __future__ import annotations

from dataclasses import dataclass

from memory_test.scale.held import held_bytes
from memory_test.scale.rates import Rates
from memory_test.scale.run import OPTIMIZERS, Run
from opacus.core.platform.sizes import BUCKET_ELEMENTS, BUCKETS_IN_FLIGHT, DEFERRED_SHARE

# The log-softmax, which autograd saves, its gradient, and that of the logits, made from both.
# Logits that the training loop holds (``Run.holds_logits``) come on top, and stay to the end.
LOGIT_COPIES = 3
BUCKET_BYTES = 4 * BUCKET_ELEMENTS  # one bucket of the clipped sum in fp32


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
    state = _state(run)
    moments = {"loss": state + _loss(run), "block": state + _block(run, rates)}
    if run.strategy == "one_pass":
        moments["kept"] = state + _kept(run, rates)
        moments["clipped sum"] = state + _clipped_sum(run, rates)
    else:
        moments["gradients"] = state + _gradients(run)
    return Memory(state, moments)


def _state(run: Run) -> float:
    return (
        run.shape.parameters / run.sharded_over * (run.parameter_bytes + OPTIMIZERS[run.optimizer])
    )


def _loss(run: Run) -> float:
    """The gradient of the loss: what the forward pass saved, and copies of the logits."""
    shape = run.shape
    each = shape.layers * _saved_of_block(run) + shape.last_bytes + LOGIT_COPIES * shape.logit_bytes
    return run.tokens_here * each + _held_logits(run) + _unsharded(run)


def _block(run: Run, rates: Rates) -> float:
    """The first block that is gone back through, the last of the model.

    The gradient of the product of its gate replaces that product, and those of both factors are
    new. Beside it lies what the head has left: its gradient, until the root is reduced, or what a
    single backward pass keeps of it; where the graph is needed again, the log-softmax.
    """
    shape = run.shape
    saved = shape.layers * _saved_of_block(run) + 2 * shape.hidden + 4 * shape.mlp
    if run.checkpointing:
        saved += shape.activation_bytes_of_block
    if run.strategy == "one_pass":
        head = held_bytes(run, rates).head
    else:
        head = 2.0 * shape.vocab * shape.hidden
    if run.strategy == "two_pass":
        saved += shape.last_bytes
        head = max(head, run.tokens_here * shape.logit_bytes + _waiting(run))
    return run.tokens_here * saved + head + _held_logits(run) + _unsharded(run)


def _waiting(run: Run) -> float:
    """Backprops that wait for deferred norms: all of them, or what they may hold."""
    if not run.deferred:
        return 0.0
    shape = run.shape
    at_start = shape.layers * _saved_of_block(run) + shape.last_bytes + shape.logit_bytes
    limit = run.tokens_here * at_start + _held_logits(run) + _unsharded(run) + _state(run)
    return min(1.0 * run.tokens_here * shape.layers * _backprops(run), DEFERRED_SHARE * limit)


def _saved_of_block(run: Run) -> int:
    """Bytes of a token that the forward pass leaves of a block: with checkpointing its input."""
    shape = run.shape
    return 2 * shape.hidden if run.checkpointing else shape.activation_bytes_of_block


def _held_logits(run: Run) -> float:
    """The logits of all tokens, where the training loop holds them during the backward pass."""
    return 1.0 * run.tokens_here * run.shape.logit_bytes * run.holds_logits


def _backprops(run: Run) -> int:
    shape = run.shape
    return 2 * (3 * shape.hidden + 2 * shape.kv + 2 * shape.mlp)


def _unsharded(run: Run) -> float:
    """Parameters outside the blocks, and one block, in half precision."""
    if not run.fsdp:
        return 0.0
    return 2.0 * (run.shape.root_parameters + run.shape.block_parameters)


def _gradients(run: Run) -> float:
    """All gradients are reduced but those outside the blocks, which are being so."""
    shape = run.shape
    logits = _held_logits(run)
    if not run.fsdp:
        return 2.0 * shape.parameters + logits
    blocks = shape.layers * shape.block_parameters
    reduced = 4 * blocks / run.sharded_over
    # Half precision gradients are copied into a padded fp32 buffer; the last block's is in flight.
    reducing = (2 + 4) * shape.root_parameters + 4 * shape.block_parameters
    # Between two passes the root is not resharded.
    kept = 2 * shape.root_parameters if run.strategy == "two_pass" else 0
    return reduced + reducing + kept + logits


def _kept(run: Run, rates: Rates) -> float:
    """The backward pass of the first block, whose activations are there."""
    shape = run.shape
    own = shape.activation_bytes_of_block + 2 * shape.hidden + 4 * shape.mlp
    kept = held_bytes(run, rates).total + _given(run)
    return kept + run.tokens_here * own + _held_logits(run) + _unsharded(run)


def _given(run: Run) -> float:
    """What the blocks that run again were given, and the gradients of their outputs."""
    return 4.0 * run.tokens_here * run.shape.hidden * run.replayed_blocks


def _clipped_sum(run: Run, rates: Rates) -> float:
    """What was kept is turned into shards, from the last parameter to the first."""
    shape = run.shape
    head = shape.vocab * shape.hidden
    held = held_bytes(run, rates)
    buckets = max(BUCKET_BYTES, 4 * head) + BUCKETS_IN_FLIGHT * BUCKET_BYTES
    summed = 4 * shape.parameters / run.sharded_over
    most = max(held.total + _given(run), summed)
    if run.replayed_blocks:  # at first those of the kept ones, at the end all
        kept = 4 * (head + (run.held_blocks or 0) * shape.block_parameters) / run.sharded_over
        own = run.tokens_here * shape.activation_bytes_of_block + 2 * shape.block_parameters
        most = max(most, max(kept + _given(run), summed) + own)
    return most + buckets + _held_logits(run)
