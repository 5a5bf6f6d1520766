"""The run to predict: a model, its cards, a batch, a mode."""

from __future__ import annotations

from dataclasses import dataclass

from memory_test.scale.shapes import LlamaShape

NON_PRIVATE = "no_dp"
# Which strategy a mode stands for. The kernels of a mode change little beside that.
MODES: dict[str, str] = {
    NON_PRIVATE: "none",
    "ghost_fsdp": "two_pass",
    "flash_fsdp": "two_pass",
    "ghost_fsdp_bk": "one_pass",
    "flash_fsdp_bk": "one_pass",
}
# Bytes of optimizer state for each fp32 parameter.
OPTIMIZERS: dict[str, int] = {"sgd": 0, "adamw": 8}


@dataclass(frozen=True)
class Run:
    """One training step under FSDP2, parameters fp32, arithmetic bf16, gradients summed in fp32.

    Attributes:
        shape: The model.
        gpus: Number of ranks W.
        tokens: Tokens T of a sample.
        batch: Samples B of a rank.
        mode: One of :data:`MODES`.
        checkpointing: Whether blocks are computed again in the backward pass.
        deferred: Whether backprops wait for the end of the first backward pass, within the budget
            that deferred norms have by default.
        shard: Ranks over which a replica is sharded (HSDP); ``None``: over all.
        optimizer: One of :data:`OPTIMIZERS`.
        node: GPUs of one host, which are linked faster than hosts are.
        holds_logits: Whether the training loop holds the model's output during the backward pass,
            as one does that has it in a variable.
        stored: Bytes of an element of a stored per-sample gradient: 1 in float8.
        held_blocks: Blocks of which records are held until the sum; ``None``: all.
        wrapped: Whether FSDP2 has the parameters; ``None``: if there are several ranks. Without it
            all is in bf16.
        offloaded_blocks: Blocks whose records wait in host memory. The others run again.
    """

    shape: LlamaShape
    gpus: int
    tokens: int
    batch: int = 1
    mode: str = "ghost_fsdp_bk"
    checkpointing: bool = False
    deferred: bool = False
    shard: int | None = None
    optimizer: str = "sgd"
    node: int = 8
    holds_logits: bool = True
    stored: int = 2
    held_blocks: int | None = None
    offloaded_blocks: int = 0
    wrapped: bool | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "tokens", "batch", "node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}")
        if self.gpus % self.sharded_over or self.sharded_over < 1:
            raise ValueError(f"shard must divide gpus, got {self.shard} and {self.gpus}")
        if not self.fsdp and (self.mode != NON_PRIVATE or self.gpus > 1):
            raise ValueError("without FSDP2 only the non-private step of one GPU is modelled")

    @property
    def replayed_blocks(self) -> int:
        """Blocks that run again for the sum."""
        if self.strategy != "one_pass" or self.held_blocks is None:
            return 0
        return self.shape.layers - self.held_blocks - self.offloaded_blocks

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 has the parameters."""
        return self.gpus > 1 if self.wrapped is None else self.wrapped

    @property
    def sharded_over(self) -> int:
        """Ranks that hold one replica."""
        return self.gpus if self.shard is None else self.shard

    @property
    def strategy(self) -> str:
        """``"none"``, ``"two_pass"`` or ``"one_pass"``."""
        return MODES[self.mode]

    @property
    def private(self) -> bool:
        """Whether gradients are clipped and noised."""
        return self.strategy != "none"

    @property
    def tokens_here(self) -> int:
        """Tokens N of a rank."""
        return self.batch * self.tokens

    @property
    def parameter_bytes(self) -> int:
        """Of a stored parameter: fp32 when sharded."""
        return 4 if self.fsdp else 2
