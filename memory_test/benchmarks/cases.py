"""What is measured: a registry of suites, each a model, cells of batch x tokens, and modes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memory_test.benchmarks.ways import Way, baselines_of, ways_of
from memory_test.common.failures import UsageError

WRAPPINGS = ("blocks", "leaves", "single", "hsdp", "tp")
OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class Cell:
    """Size of a batch on one rank: ``batch`` samples of ``tokens`` tokens."""

    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"


@dataclass(frozen=True)
class Suite:
    """Cells of one model that are measured in one run.

    Attributes:
        model: Built-in shape, see ``memory_test.common.models``.
        cells: What is measured, small ones first.
        ways: Private modes; the non-private steps are always added.
        wrapping: ``"blocks"`` or ``"leaves"``: the private model is sharded by FSDP2, a block or
            a layer at a time (the non-private one always a block at a time); ``"hsdp"``: two
            replicas, each sharded over half of the ranks; ``"tp"``: layers of blocks split over
            pairs of ranks, and FSDP2 over the pairs; ``"single"``: one process, with parameters
            in the timed type.
        lora_rank: Adapters of this rank are trained instead of the weights; 0 for none.
        checkpointing: Compute activations of a block again in the backward pass.
        compiled: Whether the non-private step is also measured with compiled blocks.
        rounds: See ``--rounds``.
        half: Whether parameters have the timed type under FSDP2 too, instead of fp32.
        optimizer: One of :data:`OPTIMIZERS`.
    """

    model: str
    cells: tuple[Cell, ...]
    ways: tuple[Way, ...]
    wrapping: str = "blocks"
    lora_rank: int = 0
    checkpointing: bool = False
    compiled: bool = True
    rounds: int = 0
    half: bool = False
    optimizer: str = "sgd"

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 shards the model."""
        return self.wrapping != "single"

    def baselines(self) -> tuple[Way, ...]:
        """The non-private steps; an eager one first, all ratios are to it."""
        return baselines_of(self.ways, self.compiled)


def cells_of(text: str) -> tuple[Cell, ...]:
    """Cells from ``"4x4096,2x8192"``.

    Raises:
        UsageError: It is written otherwise.
    """
    try:
        pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        cells = tuple(Cell(batch, tokens) for batch, tokens in pairs)
    except ValueError as error:
        raise UsageError(f"--cells {text}: write BATCHxTOKENS,..., as in 4x4096") from error
    # The loss of a language model needs a next token.
    if not all(cell.batch > 0 and cell.tokens > 1 for cell in cells):
        raise UsageError(f"--cells {text}: at least 1 sample of 2 tokens")
    return cells


# Targets of single-backward modes: time and peak memory as multiples of the best eager non-private
# step. llama3-1b on two cards, FSDP2 a block at a time, no adapters.
TARGETS: dict[Cell, tuple[float, float]] = {
    Cell(4, 4096): (1.10, 1.05),
    Cell(2, 8192): (1.10, 1.05),
    Cell(16, 1024): (1.15, 1.15),
    Cell(1, 8192): (1.15, 1.05),
    Cell(16, 512): (1.20, 1.30),
    Cell(1, 4096): (1.20, 1.10),
    Cell(4, 1024): (1.20, 1.45),
}
# Targets of other cases by model, cards and size. One card has no target for memory.
OTHER_TARGETS: dict[tuple[str, int, Cell], tuple[float, float | None]] = {
    ("llama3-3b", 2, Cell(2, 4096)): (1.10, 1.05),
    ("llama3-1b", 1, Cell(1, 4096)): (1.08, None),
}

_FSDP = ways_of("ghost_fsdp_bk,flash_fsdp_bk")
_BK = "ghost_fsdp_bk"
_BOTH = f"{_BK},{_BK}+compiled"
_SINGLE = ways_of("ghost_bk,flash_bk,ghost,hooks")
_TARGETS = cells_of("1x4096,4x1024,16x512,1x8192,16x1024,4x4096,2x8192")


def _budgets(*shares: float) -> str:
    return ",".join(["ghost_fsdp", _BK, f"{_BK}+float8", *(f"{_BK}+budget={s}x" for s in shares)])


def _like(model: str, cells: str, ways: str, **more: Any) -> Suite:
    """Each way beside the non-private step with the same features."""
    return Suite(model, cells_of(cells), ways_of(ways), **{"compiled": False, **more})


def _large(model: str, cells: str, ways: str, **more: Any) -> Suite:
    """The same of models of which only one at a time leaves the card's memory to it."""
    return _like(model, cells, ways, rounds=1, **more)


SUITES: dict[str, Suite] = {
    "fsdp-1b": Suite("llama3-1b", _TARGETS, _FSDP),
    "fsdp-1b-two-pass": Suite("llama3-1b", _TARGETS, ways_of("ghost_fsdp,ghost_fsdp+deferred")),
    "fsdp-1b-leaves": Suite("llama3-1b", cells_of("4x4096"), _FSDP, wrapping="leaves"),
    "fsdp-1b-lora": Suite("llama3-1b", cells_of("1x4096,4x4096"), _FSDP, lora_rank=16),
    "fsdp-1b-long": Suite("llama3-1b", cells_of("1x512,1x2048,1x8192,1x32768"), _FSDP[:1],
                          checkpointing=True, compiled=False),
    "fsdp-3b": Suite("llama3-3b", cells_of("2x4096"), _FSDP[:1]),
    "fsdp-8b": Suite("llama3-8b", cells_of("1x4096"), _FSDP[:1], checkpointing=True,
                     compiled=False),
    "single-1b": Suite("llama3-1b", cells_of("1x1024,4x1024,1x4096"), _SINGLE, wrapping="single"),
    "single-1b-lora": Suite("llama3-1b", cells_of("1x1024,1x4096"), _SINGLE, wrapping="single",
                            lora_rank=16),
    "tiny-fsdp": Suite("tiny", cells_of("2x16"), _FSDP[:1], compiled=False),
    "tiny-single": Suite("tiny", cells_of("2x16"), ways_of("ghost_bk"), wrapping="single",
                         compiled=False),
    # What these show is in README.md.
    "full-1b": _like("llama3-1b", "1x4096,16x512,4x4096", _BOTH),
    "eager-1b": _like("llama3-1b", "1x1024,4x1024,1x8192,16x1024,2x8192", _BK),
    "nologits-1b": _like("llama3-1b", "4x4096", f"{_BK},{_BK}+nologits"),
    "accumulation-1b": _like("llama3-1b", "2x1024", f"{_BK}+accumulate=8"),
    "half-1b": _like("llama3-1b", "1x1024,4x1024,1x4096", "ghost_bk", wrapping="single"),
    "hsdp-1b": _like("llama3-1b", "4x1024,4x4096", _BK, wrapping="hsdp"),
    "tp-1b": _like("llama3-1b", "4x1024,4x4096", "ghost_fsdp", wrapping="tp"),
    "offload-160m": _like("llama-160m", "4x512", f"ghost_fsdp+offload,{_BK}+offload",
                          optimizer="adamw"),
    "smollm2": _like("smollm2-135m", "16x512,4x2048", f"{_BOTH},{_BK}+nologits"),
    "checkpoints-3b": _large("llama3-3b", "1x4096,4x4096", _BOTH, checkpointing=True),
    "checkpoints-8b": _large("llama3-8b", "1x4096,4x4096", _BOTH, checkpointing=True),
    "budgets-3b": _large("llama3-3b", "4x4096", _budgets(1.03, 1.15), checkpointing=True),
    "budgets-8b": _large("llama3-8b", "4x4096", _budgets(1.05, 1.25, 1.6), checkpointing=True),
    "half-8b": _large("llama3-8b", "1x4096", _BK, checkpointing=True, half=True),
    "lora-8b": _large("llama3-8b", "4x512,1x2048", _BOTH, lora_rank=16),
    "lora-8b-checkpoints": _large("llama3-8b", "4x2048", _BK, lora_rank=16, checkpointing=True),
}  # fmt: skip


def suite_of(name: str, **changes: object) -> Suite:
    """A registered suite with those of ``changes`` that are not ``None``.

    Raises:
        UsageError: There is none of this name.
    """
    if name not in SUITES:
        raise UsageError(f"--suite {name}: there are {', '.join(SUITES)}")
    wanted = {key: value for key, value in changes.items() if value is not None}
    return replace(SUITES[name], **wanted)  # type: ignore[arg-type]
