"""Models with parts that ``torch.compile`` made: the same clipped sums, in few graphs."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.record import compiled as compiled_tap
from opacus.core.record.recorder import Recorder
from tests.helpers.graphs import fresh_graphs
from tests.helpers.modes import assert_close
from tests.helpers.problems import PROBLEMS, build, clipped_sum, criterion, per_sample

# Warnings that torch.compile causes in torch, and then hides from stderr only.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

B = 5
MODES = ["hooks", "ghost", "ghost-deferred", "ghost_bk", "ghost_bk-deferred", "flash_bk"]
SLOW_INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)
BACKENDS = ["aot_eager", SLOW_INDUCTOR]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_graphs():
        yield


class Block(nn.Module):
    """A part of a transformer without its attention."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    def __init__(self, blocks: int = 3, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 11)
        self.around = around

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        output: Tensor = self.head(x).mean(1)
        return output


def recomputed(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def make_private(model: nn.Module, mode: str, clip: float, loss: Any, data: TensorDataset):
    """Model, optimizer and criterion, private without noise."""
    name, _, deferred = mode.partition("-")
    out = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        criterion=loss,
        data_loader=DataLoader(data, batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        poisson_sampling=False,
        grad_sample_mode=name,
        **({"deferred_norm": True} if deferred else {}),
    )
    return out[0], out[1], out[2] if len(out) == 4 else loss


def gradient(private: Any, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """What one step would add to the parameters."""
    model, optimizer, loss = private
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.pre_step()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


def tokens_and_classes(count: int = B) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = (count, 6)
    tokens, classes = (torch.randint(0, 11, s, generator=draw) for s in (shape, shape[:1]))
    return tokens.to(DEVICE), classes.to(DEVICE)


def net(mode: str, *, compiled: str | None, clip: float = 0.05, **options: Any) -> Any:
    """``Net``, private; its blocks compiled by a backend before that."""
    torch.manual_seed(0)
    model = Net(**options).to(DEVICE)
    if compiled is not None:
        for block in model.blocks:
            block.compile(backend=compiled)
    data = TensorDataset(*(t.cpu() for t in tokens_and_classes(4 * B)))
    return make_private(model, mode, clip, nn.CrossEntropyLoss(), data)


# --- the numbers ---


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "ghost_bk-deferred"])
def test_compiled_children_give_the_oracles_clipped_sum(name: str, mode: str) -> None:
    inputs, targets = PROBLEMS[name].batch(B)
    grads = per_sample(name, build(name).double(), inputs, targets)
    _, norms = clipped_sum(grads, 1.0)
    clip = norms.median().item()
    want, _ = clipped_sum(grads, clip)
    assert (norms > clip * 1.001).any() and (norms < clip * 0.999).any()
    model = build(name)
    for child in model.children():
        child.compile(backend="aot_eager")
    data = TensorDataset(*PROBLEMS[name].batch(4 * B))
    private = make_private(model, mode, clip, criterion(name), data)
    for _ in range(2):
        assert_close([g * B for g in gradient(private, inputs, targets)], want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_give_what_eager_ones_give(mode: str, backend: str) -> None:
    inputs, targets = tokens_and_classes()
    want = gradient(net(mode, compiled=None), inputs, targets)
    private = net(mode, compiled=backend)
    for _ in range(3):
        assert_close(gradient(private, inputs, targets), want)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_models_compiled_as_a_whole(mode: str) -> None:
    inputs, targets = tokens_and_classes()
    want = gradient(net(mode, compiled=None), inputs, targets)
    model, optimizer, loss = net(mode, compiled=None)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert_close(gradient((compiled, optimizer, loss), inputs, targets), want)


@pytest.mark.parametrize(
    ("mode", "part"), [("ghost", "blocks.0"), ("ghost_bk", "head"), ("hooks", "")]
)
def test_as_many_tokens_as_samples_in_the_first_step(mode: str, part: str) -> None:
    """Then operations are followed one by one while graphs are made that end at layers."""
    inputs, targets = (t[:6] for t in tokens_and_classes(6))
    assert inputs.shape == (6, 6)
    want = gradient(net(mode, compiled=None), inputs, targets)
    with torch._functorch.config.patch(donated_buffer=False):
        private = net(mode, compiled=None)
        private[0]._module.get_submodule(part).compile(backend="aot_eager")
        assert_close(gradient(private, inputs, targets), want)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_block_replaced_by_its_compiled_one_after_make_private(mode: str) -> None:
    """Which changes the names of its parameters in the model."""
    inputs, targets = tokens_and_classes()
    want = gradient(net(mode, compiled=None), inputs, targets)
    private = net(mode, compiled=None)
    blocks = private[0]._module.blocks
    blocks[1] = torch.compile(blocks[1], backend="aot_eager")
    assert_close(gradient(private, inputs, targets), want)


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_batches_of_many_sizes(mode: str) -> None:
    """As Poisson sampling draws them: empty ones, and one sample, which needs no taps."""
    eager, compiled = net(mode, compiled=None), net(mode, compiled="aot_eager")
    for size in (5, 3, 1, 0, 1, 4, 5):
        inputs, targets = tokens_and_classes(size)
        want = gradient(eager, inputs, targets)
        assert size == 0 or any(w.any() for w in want)
        got = gradient(compiled, inputs, targets)
        assert_close(got, want, 1e-5 if size else 0.0)


def test_a_sample_that_is_not_finite_adds_nothing() -> None:
    inputs, targets = tokens_and_classes()
    inputs[2] = 10
    for mode in ("ghost", "ghost_bk"):
        found = []
        for compiled in (None, "aot_eager"):
            private = net(mode, compiled=compiled)
            with torch.no_grad():
                next(private[0].parameters())[10] = float("nan")
            found.append(gradient(private, inputs, targets))
        assert_close(found[1], found[0])
        assert all(g.isfinite().all() for g in found[1])
        assert any(g.any() for g in found[1])


def test_frozen_and_tied_layers() -> None:
    inputs, targets = tokens_and_classes()
    found = []
    for compiled in (None, "aot_eager"):
        torch.manual_seed(0)
        model = Net().to(DEVICE)
        model.blocks[1].up.requires_grad_(False)
        model.blocks[2].down.weight = model.blocks[0].down.weight
        for block in model.blocks if compiled else ():
            block.compile(backend=compiled)
        data = TensorDataset(*(t.cpu() for t in tokens_and_classes(4 * B)))
        private = make_private(model, "ghost_bk", 0.05, nn.CrossEntropyLoss(), data)
        found.append(gradient(private, inputs, targets))
    assert_close(found[1], found[0])


def test_evaluation_between_steps() -> None:
    inputs, targets = tokens_and_classes()
    model, optimizer, loss = net("ghost_bk", compiled="aot_eager")
    want = gradient((model, optimizer, loss), inputs, targets)
    model.eval()
    outputs = model(inputs)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), outputs)
    model.train()
    with torch.no_grad():
        model(inputs)
    model(inputs)  # no backward pass of it
    assert_close(gradient((model, optimizer, loss), inputs, targets), want)


@torch._functorch.config.patch(donated_buffer=True)
def test_two_passes_through_graphs_that_torch_makes_for_one() -> None:
    inputs, targets = tokens_and_classes()
    eager, compiled = net("ghost", compiled=None), net("ghost", compiled="aot_eager")
    for size in (5, 3, 4):  # graphs of sizes that vary give buffers away
        want = gradient(eager, inputs[:size], targets[:size])
        assert_close(gradient(compiled, inputs[:size], targets[:size]), want)


# --- records that the compiler may write over ---


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("mode", [*MODES, "flash-deferred"])
def test_records_are_not_used_after_their_delivery(name, mode, monkeypatch) -> None:
    """A compiler may reuse the memory of what it has delivered at once: so does this one."""
    original = Recorder.deliver

    def deliver(self, use, tensors, grads, *, borrowed=False):
        copies = [t.clone() for t in (*tensors, *grads)]
        original(self, use, tuple(copies[: len(tensors)]), tuple(copies[len(tensors) :]),
                 borrowed=True)  # fmt: skip
        for lent in copies:
            lent.fill_(float("nan") if lent.is_floating_point() else 0)

    inputs, targets = PROBLEMS[name].batch(B)
    data = TensorDataset(*PROBLEMS[name].batch(4 * B))
    private = make_private(build(name), mode, 0.1, criterion(name), data)
    want = gradient(private, inputs, targets)
    monkeypatch.setattr(Recorder, "deliver", deliver)
    assert_close(gradient(private, inputs, targets), want)


# --- what a compiler may merge, move or replace ---


class Twice(nn.Module):
    """One layer, twice on the same input, and gradients that may be equal."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.tanh(self.layer(x)), torch.tanh(self.layer(x))
        return first + self.factor * second


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk-deferred"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_uses_of_a_layer_on_one_input_both_count(backend, mode, factor) -> None:
    inputs, targets = tokens_and_classes()
    found = []
    for compiled in (None, backend):
        torch.manual_seed(0)
        model = Net(blocks=0).to(DEVICE)
        model.blocks.append(Twice(factor).to(DEVICE))
        for block in model.blocks if compiled else ():
            block.compile(backend=compiled)
        data = TensorDataset(*(t.cpu() for t in tokens_and_classes(4 * B)))
        private = make_private(model, mode, 1e6, nn.CrossEntropyLoss(), data)
        found.append(gradient(private, inputs, targets))
    assert any(w.any() for w in found[0])
    assert_close(found[1], found[0])


class ChangesInput(nn.Module):
    """The input of its second layer is changed in place after that layer has run."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        output: Tensor = self.second(hidden)
        self.change(hidden)
        return output + hidden


CHANGES = {
    "mul_": lambda t: t.mul_(3),
    "relu_": lambda t: t.relu_(),
    "part": lambda t: t[:, 0].zero_(),
    "view": lambda t: t.view(-1).add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "ghost_bk-deferred"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_changed_in_place_is_refused(backend, mode, change) -> None:
    """Autograd does so where it is not compiled; a graph would save the changed tensor."""
    inputs, targets = tokens_and_classes()
    for compiled in (None, backend):
        model = Net(blocks=0).to(DEVICE)
        model.blocks.append(ChangesInput(CHANGES[change]).to(DEVICE))
        for block in model.blocks if compiled else ():
            block.compile(backend=compiled)
        data = TensorDataset(*(t.cpu() for t in tokens_and_classes(4 * B)))
        private = make_private(model, mode, 0.1, nn.CrossEntropyLoss(), data)
        words = "changed in place after the layer has run" if compiled else "inplace operation"
        with pytest.raises(RuntimeError, match=words):
            gradient(private, inputs, targets)


# --- graphs ---


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "flash_bk-deferred"])
def test_equal_blocks_share_a_graph_that_no_layer_ends(mode: str) -> None:
    private = net(mode, compiled="aot_eager", blocks=12)
    inputs, targets = tokens_and_classes()
    for _ in range(2):
        gradient(private, inputs, targets)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("before", ["another model", "the same model"])
def test_graphs_without_taps_are_not_taken(mode: str, before: str) -> None:
    """By default torch.compile does not look at hooks when it chooses a graph."""
    inputs, targets = tokens_and_classes()
    want = gradient(net(mode, compiled=None), inputs, targets)
    torch._dynamo.config.skip_nnmodule_hook_guards = True  # as it is in a new process
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    other = copy.deepcopy(model) if before == "another model" else model
    for block in [*model.blocks, *other.blocks]:
        block.compile(backend="aot_eager")
    nn.functional.cross_entropy(other(inputs), targets).backward()
    other.zero_grad()
    data = TensorDataset(*(t.cpu() for t in tokens_and_classes(4 * B)))
    private = make_private(model, mode, 0.05, nn.CrossEntropyLoss(), data)
    for _ in range(2):
        assert_close(gradient(private, inputs, targets), want)
        if other is not model:
            nn.functional.cross_entropy(other(inputs), targets).backward()
            assert other.head.weight.grad is not None


def test_the_limit_of_graphs_is_raised_for_private_blocks() -> None:
    with torch._dynamo.config.patch(recompile_limit=8, skip_nnmodule_hook_guards=True):
        net("ghost_bk", compiled=None)
        assert torch._dynamo.config.recompile_limit == 32
    with torch._dynamo.config.patch(recompile_limit=64, skip_nnmodule_hook_guards=True):
        net("ghost_bk", compiled=None)
        assert torch._dynamo.config.recompile_limit == 64


@pytest.mark.slow
def test_torch_compile_imported_after_the_model_was_made_private() -> None:
    """In a process of its own, where its import has not been done before."""
    code = (
        "import sys, torch; from torch import nn; from opacus import PrivacyEngine\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.randn(8, 6), torch.arange(8) % 3)\n"
        "torch.manual_seed(0); model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer, loss, _ = PrivacyEngine().make_private(module=model, noise_multiplier=0.0,"
        " optimizer=optimizer, criterion=nn.CrossEntropyLoss(), max_grad_norm=0.1,"
        " data_loader=DataLoader(data, batch_size=4), grad_sample_mode='ghost_bk')\n"
        "def grads(model):\n"
        "    optimizer.zero_grad(); loss(model(data[:4][0]), data[:4][1]).backward()\n"
        "    optimizer.pre_step(); return [p.grad.clone() for p in model.parameters()]\n"
        "want = grads(model)\n"
        "compiled = torch.compile(model, backend='aot_eager')\n"
        "for _ in range(3):\n"
        "    [torch.testing.assert_close(g, w) for g, w in zip(grads(compiled), want)]\n"
        "assert not torch._dynamo.config.skip_nnmodule_hook_guards; print('equal')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize(("mode", "linked"), [("ghost_bk", False), ("ghost_bk-deferred", True)])
def test_nothing_is_left_when_graphs_are_gone(mode: str, linked: bool) -> None:
    """Nor where a second pass has carriers, which need no links between its graphs."""
    private = net(mode, compiled="aot_eager")
    inputs, targets = tokens_and_classes()
    gradient(private, inputs, targets)
    output = private[0](inputs)
    assert bool(len(compiled_tap._links)) is linked
    assert private[0]._recorder.passes.waiting_batches() == [B]
    del output
    gc.collect()
    assert len(compiled_tap._links) == 0
    assert private[0]._recorder.passes.waiting_batches() == []


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_model_have_layers_of_their_own(way: str) -> None:
    model = net("ghost_bk", compiled=None)[0]
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    for block in other._module.blocks:
        block.compile(backend="aot_eager")
    inputs, _ = tokens_and_classes()
    output = other(inputs)
    assert model._recorder.passes.waiting_batches() == []
    assert set(other._recorder.passes.waiting_batches()) == {B}
    del output


# --- what cannot be done in a graph ---


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "ghost_bk-deferred", "ghost"])
def test_checkpoints_around_compiled_blocks(mode: str) -> None:
    inputs, targets = tokens_and_classes()
    want = gradient(net(mode, compiled=None), inputs, targets)
    assert max(float(g.abs().max()) for g in want) > 1e-4
    counters.clear()
    private = net(mode, compiled="aot_eager", around=recomputed)
    for _ in range(2):
        assert_close(gradient(private, inputs, targets), want)
    assert bool(counters["graph_break"]) is (mode == "ghost")  # which ends graphs at each layer
    assert private[0]._recorder.passes.waiting_batches() == []


def test_checkpoints_inside_of_compiled_blocks_are_run_by_python() -> None:
    inputs, targets = tokens_and_classes()
    want = gradient(net("ghost_bk", compiled=None), inputs, targets)
    torch.manual_seed(0)
    model = Net(around=recomputed).to(DEVICE)
    model.compile(backend="aot_eager")
    data = TensorDataset(*(t.cpu() for t in tokens_and_classes(4 * B)))
    private = make_private(model, "ghost_bk", 0.05, nn.CrossEntropyLoss(), data)
    assert_close(gradient(private, inputs, targets), want)


def test_a_backward_pass_finds_its_own_forward_pass() -> None:
    """Blocks that run again are of the call that the loss is of, not of the latest one."""
    inputs, targets = tokens_and_classes(2 * B)
    x, y = inputs[:B], targets[:B]
    want = gradient(net("ghost_bk", compiled=None), x, y)
    model, optimizer, loss = net("ghost_bk", compiled="aot_eager", around=recomputed)
    first = loss(model(x), y)
    later = model(inputs[B : B + 2])
    first.backward()
    optimizer.pre_step()
    assert_close([p.grad for p in model.parameters()], want)
    del later


def test_compiled_blocks_that_run_again_for_an_unknown_call_are_refused() -> None:
    inputs, targets = tokens_and_classes()
    private = net("ghost_bk", compiled="aot_eager", around=recomputed)
    model, _, loss = private
    kept: list[Tensor] = []
    handle = model._module.head.register_forward_hook(lambda m, a, out: kept.append(out))
    model(inputs)
    handle.remove()
    with pytest.raises(RuntimeError, match="of which call of the model is not known"):
        loss(kept[0].mean(1), targets).backward()
    both = loss(model(inputs), targets) + loss(model(inputs), targets)
    with pytest.raises(RuntimeError, match="several forward passes are in one backward"):
        both.backward()
    reentrant = net(
        "ghost_bk",
        compiled="aot_eager",
        around=lambda block, x: checkpoint(block, x, use_reentrant=True),
    )
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        gradient(reentrant, inputs, targets)


class Owned(Net):
    """Takes the names of units."""

    def __init__(self) -> None:
        super().__init__(around=recomputed)


def test_named_units_in_compiled_blocks_that_run_again() -> None:
    inputs, targets = tokens_and_classes()
    owner = torch.tensor([3, 1, 3, 1, 7])
    sums = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Owned()
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager")
        out = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=B),
            noise_multiplier=0.0,
            max_grad_norm=0.05,
            poisson_sampling=False,
            grad_sample_mode="ghost_bk",
            privacy_unit="owner",
        )
        out[2](out[0](inputs, owner=owner), targets).backward()
        assert out[0].per_sample_gradient_norms.shape == (3,)
        assert (out[0].per_sample_gradient_norms > 0.05).any()
        sums.append([p.grad.clone() for p in model.parameters()])
    assert_close(sums[1], sums[0])


class Positions(nn.Module):
    """A table looked up once for all samples, or a layer on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shared", torch.randn(1, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.linear(self.shared)
        return output


def test_a_row_for_all_samples_is_refused_in_a_graph() -> None:
    model = nn.Sequential(nn.Embedding(11, 8), Positions(), nn.Flatten(), nn.Linear(48, 11))
    model[1].compile(backend="aot_eager")
    inputs, targets = (t.cpu() for t in tokens_and_classes())
    data = TensorDataset(*(t.cpu() for t in tokens_and_classes(4 * B)))
    private = make_private(model, "ghost_bk", 0.1, nn.CrossEntropyLoss(), data)
    with pytest.raises(ValueError, match=r"'1.linear'.*once for all 5 samples"):
        gradient(private, inputs, targets)


def test_the_variable_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPACUS_COMPILED_TAPS", "yes")
    with pytest.raises(ValueError, match="OPACUS_COMPILED_TAPS must be 0 or 1"):
        net("ghost", compiled=None)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about TF32 and the like
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["default", "reduce-overhead"])
def test_compiled_blocks_on_a_gpu(mode: str, how: str) -> None:
    inputs, targets = tokens_and_classes()
    want = gradient(net(mode, compiled=None), inputs, targets)
    private = net(mode, compiled=None)
    for block in private[0]._module.blocks:
        block.compile(mode=how)
    for _ in range(4):  # CUDA graphs begin with the third call
        assert_close(gradient(private, inputs, targets), want, 1e-4)


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_a_criterion_that_is_compiled_after_make_private_gives_the_same(mode: str) -> None:
    eager, (model, optimizer, loss) = net(mode, compiled=None), net(mode, compiled=None)
    private = model, optimizer, torch.compile(loss, backend="aot_eager")
    data = tokens_and_classes()
    assert_close(gradient(private, *data), gradient(eager, *data))
