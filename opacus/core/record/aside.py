"""Runs of a recorder's model on the side, of which the recorder remembers nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opacus.core.record.hooks import LayerHooks
from opacus.core.record.record import Record
from opacus.core.record.recorder import Recorder


@contextmanager
def aside(recorder: Recorder, sink: Callable[[Record], None]) -> Iterator[None]:
    """Hand records to ``sink``; what is known of other passes is the same afterwards."""
    before = dict(recorder.__dict__)
    fresh = recorder.whose.fresh()
    recorder.__dict__.update(whose=fresh, named=None, lone=None, bare=False)
    recorder.__dict__.update(sink=sink, probed=True, taps_in_graphs=False)
    recorder.forget()
    try:
        yield
    finally:
        for hooks in recorder._hooks:
            hooks.put_back()
        recorder.whose.end()
        recorder.__dict__.update(before)


@contextmanager
def passing_back(recorder: Recorder) -> Iterator[None]:
    """A backward pass of ours: layers that run in it are computed again."""
    before, recorder.in_backward = recorder.in_backward, True
    try:
        yield
    finally:
        recorder.in_backward = before


def others(recorder: Recorder) -> list[Recorder]:
    """Recorders of other private models that have layers of this one."""
    hooks = [h for layer in recorder.layers for h in layer.module._forward_pre_hooks.values()]
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    found = {o.recorder for o in owners if isinstance(o, LayerHooks)}
    return [r for r in found if isinstance(r, Recorder) and r is not recorder]
