"""Models in training, private or not, that are timed against each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memory_test.benchmarks.cases import COMPILED, Suite, Way
from memory_test.common.failures import UsageError
from memory_test.common.launch import Runtime
from memory_test.common.memory import size_of
from memory_test.common.models import ModelRequest, build_model, vocabulary

LEARNING_RATE = 1e-5
SEED = 0
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
        told_shape: Whether the criterion needs the shape of the logits.
    """

    way: Way
    model: Any
    optimizer: Any
    criterion: Any
    parameters: dict[str, nn.Parameter]
    vocab: int
    told_shape: bool = False

    def loss(self, ids: Tensor) -> Any:
        """Loss of predicting the next token; ``ids`` ``[B, T]``."""
        output = self.model(input_ids=ids)
        logits = getattr(output, "logits", output)[:, :-1]
        shape = {"shape": tuple(logits.shape)} if self.told_shape else {}
        del output
        flat = logits.reshape(-1, logits.shape[-1])
        return self.criterion(flat, ids[:, 1:].reshape(-1), **shape)

    def step(self, ids: Tensor) -> None:
        """One whole training step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(ids).backward()
        self.optimizer.step()

    def park(self) -> None:
        """Give back all memory but that of the weights and the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)

    def resident_bytes(self) -> int:
        """Memory that stays between steps on this rank."""
        state = [v for entry in self.optimizer.state.values() for v in entry.values()]
        return size_of([*self.model.parameters(), *self.model.buffers(), *state])


def build(recipe: Recipe, way: Way, runtime: Runtime) -> Contender:
    """Build, shard and, as ``way`` says, compile or make private. Weights depend on ``SEED`` only.

    Raises:
        UsageError: The model or the mode is not available.
    """
    suite = recipe.suite
    plain, vocab = plain_model(recipe, runtime.device)
    names = [n for n, p in plain.named_parameters() if p.requires_grad]
    if way.mode == COMPILED or way.compiled:
        for block in blocks(plain):
            block.compile(dynamic=False)
    model: Any = plain.to(recipe.dtype) if not suite.sharded else _sharded(plain, recipe, way)
    trainable = dict(zip(names, (p for p in model.parameters() if p.requires_grad), strict=True))
    optimizer = torch.optim.SGD(trainable.values(), lr=LEARNING_RATE)
    contender = Contender(way, model, optimizer, nn.CrossEntropyLoss(), trainable, vocab)
    if way.private:
        _make_private(contender, recipe, runtime)
    return contender


def plain_model(recipe: Recipe, device: torch.device) -> tuple[nn.Module, int]:
    """The model before sharding, in fp32, and the size of its vocabulary."""
    suite = recipe.suite
    request = ModelRequest(suite.model, "lm", recipe.tokens, checkpointing=suite.checkpointing)
    torch.manual_seed(SEED)
    model = build_model(request, device)
    vocab = vocabulary(model, request)
    if suite.lora_rank:
        model = _with_adapters(model, suite.lora_rank)
    return model, vocab


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks: members of the outermost module lists."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError("--lora needs the package peft (pip install peft)") from error
    known = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = [name for name in LORA_TARGETS if name in known] or "all-linear"
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets)
    model = get_peft_model(model, config)  # type: ignore[arg-type]
    for parameter in model.parameters():
        meta = parameter.is_meta  # only counted
        if parameter.requires_grad and not meta and not parameter.any():
            # At zero, half of the adapters would have no gradient: nothing to check.
            nn.init.normal_(parameter, std=0.02)
    return model


def _sharded(model: nn.Module, recipe: Recipe, way: Way) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = recipe.dtype if recipe.dtype is not torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    if way.private:
        from opacus.utils.fsdp_utils import FSDP2Wrapper

        leaves = {"use_block_wrapping": False, "wrap_individual_layers": True}
        options = leaves if recipe.suite.wrapping == "leaves" else {}
        return FSDP2Wrapper(model, mp_policy=policy, **options)
    # No code of the package, which could slow what it is compared with.
    for block in blocks(model):
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _make_private(contender: Contender, recipe: Recipe, runtime: Runtime) -> None:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from opacus import PrivacyEngine

    samples = TensorDataset(torch.zeros(64 * recipe.batch * runtime.world_size, 1))
    sampler: Any = DistributedSampler(samples, runtime.world_size, runtime.rank)
    options = {"deferred_norm": True} if contender.way.deferred else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about data loaders; the data are random here
        made = PrivacyEngine().make_private(
            module=contender.model,
            optimizer=contender.optimizer,
            criterion=contender.criterion,
            data_loader=DataLoader(samples, batch_size=recipe.batch, sampler=sampler),
            noise_multiplier=1.0,
            max_grad_norm=recipe.max_grad_norm,
            grad_sample_mode=contender.way.mode,
            poisson_sampling=False,
            **options,
        )
    contender.model, contender.optimizer = made[0], made[1]
    if len(made) == 4:
        contender.criterion, contender.told_shape = made[2], True


def random_ids(vocab: int, batch: int, tokens: int, runtime: Runtime) -> Tensor:
    """A random ``[B, T]`` batch, another one on each rank, the same for every contender."""
    generator = torch.Generator(runtime.device).manual_seed(1000 + runtime.rank)
    shape = (batch, tokens)
    return torch.randint(1, vocab, shape, generator=generator, device=runtime.device)


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean loss over the tokens of ``ids`` ``[1, T]``, without code of the package."""
    output = model(input_ids=ids)
    logits = getattr(output, "logits", output)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
