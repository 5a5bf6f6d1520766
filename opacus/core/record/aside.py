"""Runs of a recorder's model on the side, which leave the recorder's state unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opacus.core.record.hooks import LayerHooks
from opacus.core.record.passes import Passes
from opacus.core.record.record import Record
from opacus.core.record.recorder import Recorder


@contextmanager
def aside(
    recorder: Recorder, sink: Callable[[Record], None], *, relies: bool = False
) -> Iterator[None]:
    """Hand records to ``sink``; what is known of other passes is the same afterwards.

    ``relies``: whether units are taken to be where they were in the latest pass.
    """
    before = dict(recorder.__dict__)
    whose, passes = recorder.whose.fresh(relies=relies), Passes(recorder.passes.dim)
    recorder.__dict__.update(whose=whose, passes=passes, lone=None, lone_runs=False)
    recorder.__dict__.update(sink=sink, probed=True, taps_in_graphs=False)
    try:
        yield
    finally:
        recorder.put_back()
        recorder.whose.end()
        recorder.__dict__.update(before)


def others(recorder: Recorder) -> list[Recorder]:
    """Recorders of other private models that have layers of this one."""
    hooks = [h for layer in recorder.layers for h in layer.module._forward_pre_hooks.values()]
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    found = {o.recorder for o in owners if isinstance(o, LayerHooks)}
    return [r for r in found if isinstance(r, Recorder) and r is not recorder]
