"""Traces as files: reading them, and checking that a viewer can show all of them.

The format is Chrome's JSON, which Perfetto, TensorBoard's plugin and Holistic Trace Analysis
read. Times in it are microseconds.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memory_test.torch_profile.phases import PHASES

Event = dict[str, Any]
SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation", "python_function")
LAUNCHES = ("cuda_runtime", "cuda_driver")
# Times are rounded when they are written; starts and ends may be off by so much.
ROUNDING_US = 0.01


def find_traces(folder: Path) -> list[Path]:
    """All traces below a folder."""
    return sorted(p for p in folder.rglob("*") if p.name.endswith(SUFFIXES))


def read_trace(path: Path) -> dict[str, Any]:
    """The content of a trace.

    Raises:
        ValueError: It is damaged, or no trace.
    """
    try:
        content = path.read_bytes()
        found = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ValueError(f"{path} has no list traceEvents")
    return found


def spans(events: Iterable[Event], *categories: str) -> list[Event]:
    """Events with a duration, of these categories, in the order of their starts."""
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") in categories]
    return sorted(found, key=lambda e: (e["ts"], -e["dur"]))


class PhaseMap:
    """Which phase of a step each moment belongs to: the innermost one.

    One thread at a time works on a step, so the thread of a range does not matter: what the
    backward pass does in its own thread lies inside the range of the thread that waits for it.

    Args:
        events: Of a trace.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        ranges = [e for e in spans(events, "user_annotation") if e["name"] in PHASES]
        marks = [(e["ts"], 1, i) for i, e in enumerate(ranges)]
        marks += [(e["ts"] + e["dur"], 0, i) for i, e in enumerate(ranges)]
        self._starts: list[float] = []
        self._names: list[str] = []
        running: dict[int, str] = {}
        for moment, starts, index in sorted(marks):
            if starts:
                running[index] = ranges[index]["name"]
            else:
                running.pop(index, None)
            self._starts.append(moment)
            self._names.append(next(reversed(running.values()), "other"))

    def at(self, moment: float) -> str:
        """The phase at a moment, ``"other"`` outside all of them."""
        index = bisect.bisect_right(self._starts, moment) - 1
        return self._names[index] if index >= 0 else "other"


def check_trace(trace: dict[str, Any], needs_kernels: bool = False) -> list[str]:
    """What is wrong with a trace; an empty list if nothing.

    Viewers drop what breaks these rules, most of them without a word.

    Args:
        trace: From :func:`read_trace`.
        needs_kernels: Whether it must have kernels of a GPU.
    """
    events = trace["traceEvents"]
    complete = [e for e in events if e.get("ph") == "X"]
    bad = [e for e in complete if not _is_whole(e)]
    if bad or not complete:
        first = f", such as {json.dumps(bad[0])[:120]}" if bad else ""
        return [f"{len(bad)} of {len(complete)} events lack a name, a place or a time{first}"]
    wrong = _overlaps(complete) + _loose_flows(events)
    names = {e["name"] for e in complete if e.get("cat") == "user_annotation"}
    if not any(str(name).startswith("ProfilerStep#") for name in names):
        wrong.append("no ProfilerStep: no whole step was recorded")
    missing = [name for name in ("forward", "backward", "step") if name not in names]
    if missing:
        wrong.append(f"no range {', '.join(missing)}")
    if not any(e.get("name") == "[memory]" for e in events):
        wrong.append("no [memory] events: no memory view")
    return wrong + _kernel_faults(complete, needs_kernels)


def _is_whole(event: Event) -> bool:
    numbers = [event.get("ts"), event.get("dur")]
    return (
        bool(event.get("name"))
        and "pid" in event
        and "tid" in event
        and all(isinstance(n, (int, float)) for n in numbers)
        and event["dur"] >= 0
    )


def _overlaps(complete: list[Event]) -> list[str]:
    """Events of one thread must lie in each other or apart.

    Not those of a GPU: a kernel may begin before the one before it has ended, and calls of
    the driver are timed by another clock.
    """
    lanes: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in spans(complete, *HOST):
        lanes[event["pid"], event["tid"]].append(event)
    wrong = []
    for lane, lane_events in lanes.items():
        open_until: list[float] = []
        crossing = 0
        for event in lane_events:
            start, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= start + ROUNDING_US:
                open_until.pop()
            crossing += bool(open_until and end > open_until[-1] + ROUNDING_US)
            open_until.append(end)
        if crossing:
            wrong.append(f"{crossing} events of thread {lane} overlap without nesting")
    return wrong


def _loose_flows(events: list[Event]) -> list[str]:
    """Arrows from nowhere; those to a kernel whose launch is there are drawn by its number."""
    ends = Counter((e.get("cat"), e.get("id")) for e in events if e.get("ph") == "f")
    starts = {(e.get("cat"), e.get("id")) for e in events if e.get("ph") == "s"}
    launched = {correlation(e) for e in events if e.get("cat") in LAUNCHES}
    loose = [key for key in ends if key not in starts and key[1] not in launched]
    return [f"{len(loose)} arrows end without a start"] if loose else []


def _kernel_faults(complete: list[Event], needed: bool) -> list[str]:
    kernels = [e for e in complete if e.get("cat") == "kernel"]
    if not kernels:
        return ["no kernels of a GPU"] if needed else []
    launched = {correlation(e) for e in complete if e.get("cat") in LAUNCHES}
    lost = sum(correlation(e) not in launched for e in kernels)
    return [f"{lost} of {len(kernels)} kernels without their launch"] if lost else []


def correlation(event: Event) -> Any:
    """Number that a kernel shares with its launch."""
    return event.get("args", {}).get("correlation")
