"""Helps the C library keep memory that a training step will ask for again."""

from __future__ import annotations

import functools

import torch

# The largest block whose return raises glibc's thresholds, less what it adds itself.
BLOCK_BYTES = (32 << 20) - (64 << 10)


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what a step frees on the CPU, up to 64 MB; once for a process.

    glibc gives the top of the heap back when more lies free there than twice the largest block
    that has ever been mapped by itself and returned (``M_TRIM_THRESHOLD`` in ``man mallopt``).
    Steps without large temporaries never raise that, and then pay thousands of page faults each
    to get the same memory again. One large block that is mapped and returned raises it; its pages
    are never touched. Other C libraries do not mind. Set ``MALLOC_TRIM_THRESHOLD_`` to decide for
    yourself: it turns this behaviour of glibc off.
    """
    torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
