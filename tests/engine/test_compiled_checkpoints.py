"""Compiled blocks that checkpoint themselves: exact, in one graph, as little saved as in eager."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.record.own_checkpoints import OwnCheckpoints
from opacus.core.record.recorder import Recorder
from tests.helpers import oracle
from tests.helpers.graphs import fresh_graphs

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is:FutureWarning"),
]

B, CLIP = 5, 0.3


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_graphs():
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(checkpoint_wrapper(Block(), **options) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x.mean(1))
        return output


class Llama(nn.Module):
    """Transformers' blocks, after ``gradient_checkpointing_enable``."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=12,
            vocab_size=11,
            use_cache=False,
        )
        self.model = transformers.LlamaModel(config)
        options = {"use_reentrant": False}
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        self.blocks = self.model.layers
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.model(input_ids=tokens).last_hidden_state.mean(1))
        return output


def _some_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy that saves what matrix products give."""
    saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _some_products)
MODELS: dict[str, Any] = {
    "transformers": Llama,
    "wrapper": Net,
    "selective": functools.partial(Net, context_fn=SELECTIVE),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().train()


def batch(count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, 11, (count, 6), generator=draw)
    return tokens, torch.randint(0, 4, (count,), generator=draw)


def private(model: nn.Module, mode: str) -> tuple[Any, Any, Any]:
    found = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        loss_reduction="sum",
        data_loader=DataLoader(TensorDataset(*batch(4 * B)), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    return found[0], found[1], found[2]


def clipped(name: str, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What the oracle gives, of samples of which some are clipped."""

    def loss(model: nn.Module, sample: Any) -> Tensor:
        return nn.functional.cross_entropy(model(sample[0]), sample[1], reduction="sum")

    grads = oracle.per_sample_gradients(build(name).double(), loss, (inputs, targets))
    assert (oracle.norms(grads) > CLIP * 1.01).any()
    return oracle.clipped_sum(grads, CLIP)


def saved(module: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    """The output, and the bytes that its graph holds."""
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(inputs)
    return output, sum(held.values())


# A lone sample runs without taps, also where it runs again; not in graphs of one process.
SIZES = {"transformers": (B, B), "wrapper": (B, 1, B), "selective": (B, B)}


@pytest.mark.parametrize("name", MODELS)
def test_the_oracles_sum_each_layer_recorded_once_little_saved(name, monkeypatch) -> None:
    recorded: Counter[str] = Counter()
    original = Recorder.deliver

    def deliver(self: Recorder, use: Any, *args: Any, **kwargs: Any) -> None:
        recorded[use.spec.name] += 1
        original(self, use, *args, **kwargs)

    monkeypatch.setattr(Recorder, "deliver", deliver)
    eager, _, _ = private(build(name), "ghost_bk")
    model = build(name)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    module, optimizer, loss = private(model, "ghost_bk")
    of_blocks = {n for n in (x.spec.name for x in module._recorder.layers) if "s." in n}
    assert len(of_blocks) >= 6
    for size in SIZES[name]:
        inputs, targets = batch(size)
        want = clipped(name, inputs, targets)
        recorded.clear()
        optimizer.zero_grad()
        output, held = saved(module, inputs)
        assert held <= saved(eager, inputs)[1] + 64  # and a few numbers
        loss(output, targets).backward()
        for (key, wanted), p in zip(want.items(), model.parameters(), strict=True):
            assert oracle.relative_error(p.grad, wanted) < 1e-5, key
        assert {n: k for n, k in recorded.items() if n in of_blocks} == dict.fromkeys(of_blocks, 1)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == len(set(SIZES[name]))  # none where it runs again


@pytest.mark.parametrize("compiled", [False, True])
def test_two_passes_through_selective_checkpoints_are_refused_with_the_remedy(compiled) -> None:
    model = build("selective")
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager")
    module, _, loss = private(model, "ghost")
    inputs, targets = batch(B)
    with pytest.raises(RuntimeError, match=r"selective.*use the mode with _bk at its end"):
        loss(module(inputs), targets).backward()


def test_checkpoints_are_taken_out_of_compiled_blocks_only() -> None:
    """And not reentrant ones, which hide the forward pass that graphs have to find again."""
    blocks = [checkpoint_wrapper(Block()) for _ in range(3)]
    blocks[2].checkpoint_fn = functools.partial(checkpoint, use_reentrant=True)
    own = OwnCheckpoints(nn.ModuleList(blocks).modules())
    seen: list[Any] = []
    for block in blocks[1:]:
        block._compiled_call_impl = functools.partial(_note, seen, block)
    compiled = [block._compiled_call_impl for block in blocks]
    for _ in range(2):
        own.put_around()
    for block in blocks:
        block(torch.ones(1, 8))
    assert [b for b, _ in seen] == blocks[1:]
    assert [c is blocks[2].checkpoint_fn for _, c in seen] == [False, True]
    with torch.no_grad():
        blocks[1](torch.ones(1, 8))
    assert seen.pop()[1] is blocks[1].checkpoint_fn
    own.remove()
    assert [block._compiled_call_impl for block in blocks] == compiled


def _note(seen: list[Any], block: Any, x: Tensor) -> Tensor:
    seen.append((block, block.checkpoint_fn))
    return x
