"""How much host memory a process takes beside its GPU unless the user says otherwise."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

# Of what is free when it is first asked, for all GPUs of the host together.
SHARE = 0.25
_INFO = Path("/proc/meminfo")
# The limit of a container, and what it uses: cgroups of version 2, then 1.
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


@functools.cache
def host_share(device: torch.device) -> int:
    """Bytes of host memory that records of a GPU may be sent to; the same for a whole run.

    0 for a CPU, which has no memory beside the host's, and where nothing is known of it.
    """
    if device.type != "cuda":
        return 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or torch.cuda.device_count()
    return int(SHARE * free_host_memory()) // max(1, processes)


def free_host_memory() -> int:
    """Bytes that this machine, and the container that the process is in, can still give."""
    free = [_available()]
    for limit, used in _LIMITS:
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            free.append(max(0, most - now))
    return min(free)


def _available() -> int:
    try:
        lines = _INFO.read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] << 10 if found else 0  # in KiB there


def _number(file: Path) -> int | None:
    """What a file says; ``None`` where there is none, or no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
