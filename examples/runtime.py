"""The processes of a run: rank, device, and sums over all of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Runtime:
    """Where this process stands.

    Attributes:
        rank: Number of this process.
        world_size: Number of processes.
        device: Where the model lives.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sums over all processes (a collective call)."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def shared_seed(self, seed: int | None) -> int:
        """``seed``, or a secret one from the operating system; the same on all processes."""
        if seed is not None:
            return seed
        drawn = torch.tensor([int.from_bytes(os.urandom(7), "big")])
        if self.world_size > 1:
            dist.broadcast(drawn, src=0)
        return int(drawn)


def this_rank() -> int:
    """Number of this process; as torchrun's environment says, if there is no group yet."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


@contextlib.contextmanager
def running(device: str = "auto") -> Iterator[Runtime]:
    """Set up the process group, as torchrun's environment says; a group of one without it.

    A group that there is already is used, and left as it is.

    Args:
        device: See :func:`choose_device`.
    """
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    given = dist.is_initialized()
    if not given:
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        alone = "WORLD_SIZE" not in os.environ
        group = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
        dist.init_process_group(backend, **group)
    try:
        yield Runtime(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        if not given:
            dist.destroy_process_group()


def choose_device(wanted: str) -> torch.device:
    """Where this process computes.

    Args:
        wanted: ``"cuda"`` for a GPU a process, ``"cpu"``, or ``"auto"`` for GPUs if there are
            enough on this host.

    Raises:
        ValueError: There are fewer GPUs than processes on this host.
    """
    index = int(os.environ.get("LOCAL_RANK", 0))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= here
    if wanted == "cuda" and not enough:
        raise ValueError(
            f"--device cuda: {here} processes on this host, but {torch.cuda.device_count()} GPUs; "
            "start fewer processes or use --device cpu"
        )
    return torch.device("cuda", index) if enough and wanted != "cpu" else torch.device("cpu")
