"""The same training in one process and over W ranks, step by step.

Shapes: N samples of a step, S steps, P parameters as one vector.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from memory_test.common.comparison import table
from memory_test.common.dp_transformer import DPTransformer
from memory_test.common.failures import UsageError
from memory_test.common.launch import Runtime
from memory_test.common.modes import HARNESS_MODES, package_modes

VOCAB = 64
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Problem:
    """What is trained: a small language model on ``steps`` batches of random tokens."""

    steps: int
    samples: int
    length: int
    seed: int
    device: torch.device

    def model(self) -> DPTransformer:
        """The model at its start, the same each time."""
        torch.manual_seed(self.seed)
        built = DPTransformer(vocab_size=VOCAB, width=32, depth=2, heads=4, max_length=self.length)
        return built.to(self.device)

    def batches(self) -> list[Tensor]:
        """Tokens ``[N, T]`` of each step; samples of different scale, by repeated tokens."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (self.steps, self.samples, self.length), generator=generator)
        tokens[:, ::3] = tokens[:, ::3, :1]
        return list(tokens.to(self.device))


@dataclass
class Trace:
    """What was seen: norms ``[S, N]`` in the order of the samples, losses ``[S]``, the change
    of the parameters ``[P]``, and the clipping norm."""

    limit: float
    norms: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    change: Tensor | None = None
    # What the norms would be if squares were summed over ranks that hold different samples.
    summed_over_ranks: list[Tensor] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """What plots and tables need of it."""
        norms = [row.tolist() for row in self.norms]
        return {"limit": self.limit, "norms": norms, "losses": self.losses}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Trace:
        """The opposite of :meth:`as_json`."""
        norms = [torch.tensor(row) for row in found["norms"]]
        return cls(found["limit"], norms, found["losses"])


def fsdp_modes(wanted: Sequence[str] | None) -> list[str]:
    """The FSDP modes to test.

    Raises:
        UsageError: One of ``wanted`` is not in this package, or no FSDP mode.
    """
    known = package_modes()
    have = [m for m in HARNESS_MODES if "fsdp" in m and m in known]
    for mode in wanted or ():
        if mode not in have:
            raise UsageError(f"--grad-sample-mode {mode}: this opacus has {', '.join(have)}")
    return list(wanted or have)


def layouts_to_test(
    wanted: Sequence[str] | None, all_layouts: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The layouts to test, and those that cannot be.

    Raises:
        UsageError: This package does not know a requested layout.
    """
    if has_data_layout():
        return list(wanted or all_layouts), []
    if "replicated" in (wanted or ()):
        raise UsageError("--layouts replicated: make_private of this opacus has no data_layout")
    return ["sharded"], [] if wanted else ["replicated"]


def has_data_layout() -> bool:
    """Whether ``make_private`` can be told that the ranks hold the same samples."""
    from opacus import PrivacyEngine

    return "data_layout" in inspect.signature(PrivacyEngine.make_private).parameters


def train_alone(problem: Problem) -> Trace:
    """Train in this process; half of the samples of the first step are clipped."""
    os.environ["OPACUS_INDEPENDENT_RANKS"] = "1"  # each rank trains the same model, to compare
    model = problem.model()
    limit = _median_norm(problem)
    private, optimizer, criterion = _private(problem, model, "ghost", limit, None, False)
    trace = Trace(limit)
    start = _vector(model)
    for tokens in problem.batches():
        loss = _step(private, optimizer, criterion, tokens)
        trace.norms.append(private.per_sample_gradient_norms.clone().cpu())
        trace.losses.append(loss)
    trace.change = _vector(model) - start
    return trace


def train_sharded(
    problem: Problem, runtime: Runtime, mode: str, layout: str, deferred: bool
) -> Trace:
    """Train over all ranks; a collective call."""
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    model = FSDP2Wrapper(problem.model())
    start = _vector(model)
    trace = Trace(_median_norm(problem))
    private, optimizer, criterion = _private(problem, model, mode, trace.limit, layout, deferred)
    rank, world = runtime.rank, runtime.world_size
    for tokens in problem.batches():
        own = tokens[rank::world] if layout == "sharded" else tokens
        loss = _step(private, optimizer, criterion, own)
        norms = private.per_sample_gradient_norms.clone()
        if layout == "sharded":
            # Rank order to sample order: sample j of rank r is number j W + r.
            gathered = private.gather_norm_samples().view(world, -1)
            summed = norms.square()
            dist.all_reduce(summed)
            trace.summed_over_ranks.append(summed.sqrt().repeat_interleave(world).cpu())
            norms = gathered.t().reshape(-1)
            loss = _mean(loss, runtime)
        trace.norms.append(norms.cpu())
        trace.losses.append(loss)
    trace.change = _vector(model) - start
    return trace


def compare(
    alone: Trace, trace: Trace, norm_error: float, parameter_error: float
) -> dict[str, Any]:
    """Largest relative errors, and whether they are within the limits."""
    expected, found = torch.stack(alone.norms), torch.stack(trace.norms)
    if not 0 < int((expected[0] > alone.limit).sum()) < expected.shape[1]:
        raise RuntimeError("all or no samples are clipped: the comparison would say little")
    assert alone.change is not None and trace.change is not None
    norms = float(((found - expected).abs() / expected).max())
    change = float((trace.change - alone.change).norm() / alone.change.norm())
    losses = max(abs(a - b) / abs(a) for a, b in zip(alone.losses, trace.losses, strict=True))
    inflated = [s / e for s, e in zip(trace.summed_over_ranks, alone.norms, strict=False)]
    return {
        "norm_error": norms,
        "loss_error": losses,
        "parameter_error": change,
        "holds": norms <= norm_error and change <= parameter_error,
        "norms": found.tolist(),
        "losses": trace.losses,
        "summed_over_ranks": [s.tolist() for s in trace.summed_over_ranks],
        "inflation": float(torch.stack(inflated).mean()) if inflated else None,
    }


def line_of(row: dict[str, Any]) -> str:
    """A comparison in one line."""
    name = f"{row['mode']}, {row['layout']}, {'deferred' if row['deferred'] else 'immediate'}"
    errors = ", ".join(f"{k} {row[f'{k}_error']:.1e}" for k in ("norm", "loss", "parameter"))
    return f"{name}: {errors}: {'agrees' if row['holds'] else 'DIFFERS'}"


# --- training ---


def _private(
    problem: Problem, model: nn.Module, mode: str, limit: float, layout: str | None, deferred: bool
) -> tuple[Any, Any, Any]:
    from opacus import PrivacyEngine

    samples = TensorDataset(torch.zeros(problem.samples * problem.steps, 1))
    size, sampler = problem.samples, None
    if layout == "sharded":
        sampler = DistributedSampler(samples, shuffle=False)
        size //= dist.get_world_size()
    options = {"data_layout": layout} if layout and has_data_layout() else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, criterion, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-4),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(samples, batch_size=size, sampler=sampler),
            noise_multiplier=0.0,
            max_grad_norm=limit,
            poisson_sampling=False,
            grad_sample_mode=mode,
            deferred_norm=deferred,
            **options,
        )
    return private, optimizer, criterion


def _step(private: Any, optimizer: Any, criterion: Any, tokens: Tensor) -> float:
    optimizer.zero_grad()
    logits = private(tokens)[:, :-1]
    loss = criterion(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1), shape=logits.shape)
    loss.backward()
    optimizer.step()
    return float(loss.item())


def _median_norm(problem: Problem) -> float:
    """Middle of the norms of the first batch, by one sample at a time."""
    model, tokens = problem.model(), problem.batches()[0]
    norms = []
    for sample in tokens:
        model.zero_grad()
        logits = model(sample[None])[:, :-1]
        nn.functional.cross_entropy(logits[0], sample[1:]).backward()
        norms.append(
            torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        )
    ordered = torch.stack(norms).sort().values
    middle = len(ordered) // 2
    return float((ordered[middle - 1] + ordered[middle]) / 2)


def _vector(model: nn.Module) -> Tensor:
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in parts]).cpu()


def _mean(value: float, runtime: Runtime) -> float:
    total = torch.tensor([value], device=runtime.device, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / runtime.world_size


# --- report ---


def report(
    rows: list[dict[str, Any]],
    alone: Trace,
    world: int,
    device: str,
    left_out: Sequence[str],
    fine: bool,
) -> str:
    """The comparison as Markdown."""
    cells = [
        (
            f"`{r['mode']}`",
            r["layout"],
            "deferred" if r["deferred"] else "immediate",
            f"{r['norm_error']:.1e}",
            f"{r['loss_error']:.1e}",
            f"{r['parameter_error']:.1e}",
            "agrees" if r["holds"] else "**differs**",
        )
        for r in rows
    ]
    header = ("mode", "samples", "norms are", "norms", "losses", "parameters", "verdict")
    clipped = int((alone.norms[0] > alone.limit).sum())
    inflation = [r["inflation"] for r in rows if r["inflation"] is not None]
    parts = [
        f"# One process against {world} ranks ({device})",
        f"Relative errors after {len(alone.losses)} steps of AdamW, noise off, fp32; {clipped} of "
        f"{len(alone.norms[0])} samples of the first step are clipped. Norms: largest error of a "
        "sample; parameters: of the vector of their changes.",
        table(header, cells),
    ]
    if inflation:
        parts.append(
            "For comparison: summing squared norms over ranks that hold different samples would "
            f"make norms {inflation[0]:.2f} times too large on average (√W is {world**0.5:.2f})."
        )
    parts += [
        f"The layout {name} was not tested: this package has no `data_layout`." for name in left_out
    ]
    parts += ["![accuracy](accuracy.png)", "**Passed.**" if fine else "**Failed.**"]
    return "\n\n".join(parts) + "\n"


def draw(rows: list[dict[str, Any]], alone: Trace, world: int) -> Any:
    """Norms against each other, and losses by step."""
    from memory_test.common.plots import MARKERS, two_panels

    figure, (left, right) = two_panels(f"one process against {world} ranks")
    expected = torch.stack(alone.norms).flatten()
    span = [float(expected.min()) * 0.95, float(expected.max()) * 1.05]
    wrong = next((r for r in rows if r["summed_over_ranks"]), None)
    if wrong is not None:
        summed = torch.tensor(wrong["summed_over_ranks"]).flatten()
        left.scatter(expected, summed, s=26, marker="x", color="#d6457a",
                     label="if summed over ranks")  # fmt: skip
        span[1] = max(span[1], float(summed.max()) * 1.05)
    left.plot(span, span, color="#333333", linewidth=1, label="equal")
    right.plot(range(1, len(alone.losses) + 1), alone.losses, color="#333333", label="one process")
    names = {}
    for row in rows:  # deferred and immediate, and modes, lie on each other: one mark a layout
        names.setdefault(row["layout"], row)
    for index, (layout, row) in enumerate(names.items()):
        colour = ("#4292c6", "#f4a340")[index % 2]
        style = {"color": colour, "marker": MARKERS[index], "label": f"{world} ranks, {layout}"}
        size = 34 - 18 * index
        left.scatter(expected, torch.tensor(row["norms"]).flatten(), s=size, zorder=3, **style)
        right.plot(range(1, len(row["losses"]) + 1), row["losses"], linestyle="none", **style)
    left.set(title="Per-sample gradient norms", xlabel="one process", ylabel=f"{world} ranks")
    right.set(title="Loss", xlabel="step")
    right.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    right.legend()
    return figure
