"""Models in training, private or not, that are timed against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memory_test.benchmarks.cases import Suite
from memory_test.benchmarks.layouts import DataRank, adapt, blocks, data_rank, sharded
from memory_test.benchmarks.made_private import limit, make_private
from memory_test.benchmarks.ways import Way
from memory_test.common.failures import UsageError
from memory_test.common.launch import Runtime
from memory_test.common.memory import local_tensors, size_of
from memory_test.common.models import ModelRequest, build_model, vocabulary

LEARNING_RATE = 1e-5
SEED = 0
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How a model is built.

    Attributes:
        suite: Model, wrapping, adapters.
        tokens: Longest sample.
        batch: Samples of a rank.
        dtype: Type of the arithmetic.
        max_grad_norm: Clipping norm C.
    """

    suite: Suite
    tokens: int
    batch: int
    dtype: torch.dtype
    max_grad_norm: float = 1.0


@dataclass
class Contender:
    """One model in training.

    Attributes:
        way: The mode.
        model: The model to call.
        optimizer: The optimizer to step.
        criterion: The loss; that of ``make_private`` if that gave one.
        parameters: Trainable parameters by name in the plain model.
        vocab: Number of tokens in the vocabulary.
        data: Which samples this rank has.
        device: Where it computes.
        told_shape: Whether the criterion is that of ``make_private``, which needs the shape of
            logits.
    """

    way: Way
    model: Any
    optimizer: Any
    criterion: Any
    parameters: dict[str, nn.Parameter]
    vocab: int
    data: DataRank
    device: torch.device
    told_shape: bool = False

    def loss(self, ids: Tensor) -> Any:
        """Loss of predicting the next token; ``ids`` ``[B, T]``."""
        if self.way.nologits:
            losses = self.model(input_ids=ids, labels=ids).loss  # [B]
            return self.criterion(losses) if self.told_shape else losses.mean()
        output = self.model(input_ids=ids)
        logits = getattr(output, "logits", output)[:, :-1]
        shape = {"shape": tuple(logits.shape)} if self.told_shape else {}
        del output
        flat = logits.reshape(-1, logits.shape[-1])
        return self.criterion(flat, ids[:, 1:].reshape(-1), **shape)

    def step(self, ids: Tensor) -> None:
        """One whole training step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.backward(ids)
        self.optimizer.step()

    def backward(self, ids: Tensor) -> None:
        """All that comes before a step: ``ids`` once for each physical batch."""
        if self.way.accumulate == 1:
            self.loss(ids).backward()
            return
        for left in reversed(range(self.way.accumulate)):
            self._physical(ids, left)

    def _physical(self, ids: Tensor, left: int) -> None:
        """A physical batch that ``left`` others of its step follow."""
        if not self.way.private:
            if hasattr(self.model, "set_requires_gradient_sync"):
                self.model.set_requires_gradient_sync(not left)
            (self.loss(ids) / self.way.accumulate).backward()
            return
        self.optimizer.signal_skip_step(left > 0)
        self.loss(ids).backward()
        if left:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def park(self) -> None:
        """Give back all memory but that of the weights and the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)

    def ids(self, batch: int, tokens: int) -> Tensor:
        """A random ``[batch, tokens]`` batch: each part of the data another, the same each time."""
        generator = torch.Generator(self.device).manual_seed(1000 + self.data.rank)
        shape = (batch, tokens)
        return torch.randint(1, self.vocab, shape, generator=generator, device=self.device)

    def resident_bytes(self) -> int:
        """Memory of the device that stays between steps on this rank."""
        state = [v for entry in self.optimizer.state.values() for v in entry.values()]
        held = local_tensors([*self.model.parameters(), *self.model.buffers(), *state])
        return size_of(tensor for tensor in held if tensor.device.type == self.device.type)

    def held(self) -> dict[str, Any]:
        """What the latest step held for the clipped sum: layers by how, and GiB."""
        planner = getattr(getattr(self.model, "_strategy", None), "planner", None)
        if planner is None:
            return {}
        gib = {"held_gib": planner.held_bytes, "host_gib": planner.host_bytes}
        return {"ways": planner.report.ways, **{k: round(v / 2**30, 3) for k, v in gib.items()}}


def build(recipe: Recipe, way: Way, runtime: Runtime, peak: float = 0.0) -> Contender:
    """Build, shard and, as ``way`` says, compile or make private. Weights depend on ``SEED`` only.

    Args:
        recipe: How.
        way: What.
        runtime: This process.
        peak: Bytes that the non-private step needs at its peak, which a budget may depend on.

    Raises:
        UsageError: The model or the mode is not available.
    """
    suite = recipe.suite
    plain, vocab = plain_model(recipe, runtime.device)
    names = [n for n, p in plain.named_parameters() if p.requires_grad]
    if way.nologits:
        _take_logits(plain, suite)
    if way.compiles:
        for block in blocks(plain):
            block.compile(dynamic=False)
    device = runtime.device
    model: Any = (
        sharded(plain, suite, way, recipe.dtype, device)
        if suite.sharded else plain.to(recipe.dtype)
    )  # fmt: skip
    trainable = dict(zip(names, (p for p in model.parameters() if p.requires_grad), strict=True))
    # One kernel for many parameters takes those of one mesh only.
    several = {"foreach": False} if suite.wrapping == "tp" else {}
    optimizer = OPTIMIZERS[suite.optimizer](trainable.values(), lr=LEARNING_RATE, **several)
    criterion = nn.Identity() if way.nologits else nn.CrossEntropyLoss()
    place = data_rank(suite, runtime)
    contender = Contender(way, model, optimizer, criterion, trainable, vocab, place, device)
    if way.private:
        objects = {"module": model, "optimizer": optimizer, "criterion": criterion}
        made = make_private(way, objects, place, recipe.batch, recipe.max_grad_norm)
        contender.model, contender.optimizer = made[:2]
        if len(made) == 4:
            contender.criterion, contender.told_shape = made[2], True
        limit(contender.model, way, peak, device)
    return contender


def plain_model(recipe: Recipe, device: torch.device) -> tuple[nn.Module, int]:
    """The model before sharding, in fp32, and the size of its vocabulary."""
    suite = recipe.suite
    request = ModelRequest(suite.model, "lm", recipe.tokens, checkpointing=suite.checkpointing)
    torch.manual_seed(SEED)
    model = build_model(request, device)
    vocab = vocabulary(model, request)
    if suite.lora_rank:
        adapt(model, suite.lora_rank)
    return model, vocab


def _take_logits(model: Any, suite: Suite) -> None:
    from opacus.losses import linear_head, without_logits

    if linear_head(model) is None:
        raise UsageError(f"nologits: {suite.model} has no head for it; tiny-llama has, say")
    without_logits(model)


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean loss over the tokens of ``ids`` ``[1, T]``, without code of the package."""
    output = model(input_ids=ids)
    logits = getattr(output, "logits", output)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
