"""What is measured: a registry of suites, each a model, cells of batch x tokens, and modes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memory_test.common.failures import UsageError

EAGER, COMPILED = "no_dp", "no_dp_compiled"
BASELINES = (EAGER, COMPILED)
DEFERRED = "+deferred"
COMPILED_BLOCKS = "+compiled"
WRAPPINGS = ("blocks", "leaves", "single")


@dataclass(frozen=True)
class Cell:
    """Size of a batch on one rank: ``batch`` samples of ``tokens`` tokens."""

    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"


@dataclass(frozen=True)
class Way:
    """One way to train: a mode, with immediate or deferred norms.

    Attributes:
        mode: ``"no_dp"``, ``"no_dp_compiled"`` or a ``grad_sample_mode``.
        deferred: Whether norms wait for the end of the backward pass.
        compiled: Whether the blocks of a private model are compiled.
    """

    mode: str
    deferred: bool = False
    compiled: bool = False

    @property
    def private(self) -> bool:
        """Whether gradients are clipped and noised."""
        return self.mode not in BASELINES

    def __str__(self) -> str:
        return self.mode + DEFERRED * self.deferred + COMPILED_BLOCKS * self.compiled


@dataclass(frozen=True)
class Suite:
    """Cells of one model that are measured in one run.

    Attributes:
        model: Built-in shape, see ``memory_test.common.models``.
        cells: What is measured, small ones first.
        ways: Private modes; the non-private steps are always added.
        wrapping: ``"blocks"`` or ``"leaves"``: the private model is sharded by FSDP2, a block or
            a layer at a time (the non-private one always a block at a time); ``"single"``: one
            process.
        lora_rank: Adapters of this rank are trained instead of the weights; 0 for none.
        checkpointing: Compute activations of a block again in the backward pass.
        compiled: Whether the non-private step is also measured with compiled blocks.
    """

    model: str
    cells: tuple[Cell, ...]
    ways: tuple[Way, ...]
    wrapping: str = "blocks"
    lora_rank: int = 0
    checkpointing: bool = False
    compiled: bool = True

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 shards the model."""
        return self.wrapping != "single"

    def baselines(self) -> tuple[Way, ...]:
        """The non-private steps; the eager one first, all ratios are to it."""
        return tuple(Way(mode) for mode in (BASELINES if self.compiled else (EAGER,)))


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


def ways_of(text: str) -> tuple[Way, ...]:
    """Private modes from ``"ghost_fsdp_bk,ghost_fsdp+deferred,ghost_bk+compiled"``.

    Raises:
        UsageError: One of them is not private.
    """
    names = [name for name in text.split(",") if name]
    ways = tuple(_way_of(name) for name in names)
    for way in ways:
        if not way.private:
            raise UsageError(f"--modes {way}: non-private steps are measured anyway")
    return ways


def _way_of(name: str) -> Way:
    plain = name.removesuffix(COMPILED_BLOCKS)
    mode = plain.removesuffix(DEFERRED)
    return Way(mode, deferred=mode != plain, compiled=plain != name)


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
_SINGLE = ways_of("ghost_bk,flash_bk,ghost,hooks")
_TARGETS = cells_of("1x4096,4x1024,16x512,1x8192,16x1024,4x4096,2x8192")

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
