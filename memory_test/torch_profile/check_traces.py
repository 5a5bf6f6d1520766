"""Check that traces are sound and that viewers can read them whole.

    python check_traces.py runs                        # our own rules (see traces.py)
    python check_traces.py runs --reader plugin        # TensorBoard's plugin
    python check_traces.py runs --reader hta           # Holistic Trace Analysis
    python check_traces.py runs --reader perfetto      # Perfetto's trace processor

A reader is given each trace and must find all its events. The word PASSED is printed only if all
traces are sound; the exit status is then 0, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.failures import EXIT_FAILED, EXIT_USAGE

PACKAGES = {
    "plugin": "torch_tb_profiler",
    "hta": "HolisticTraceAnalysis",
    "perfetto": "perfetto",
}


def read_with_plugin(path: Path, trace: dict[str, Any]) -> list[str]:
    """Parse a trace as TensorBoard's profiler plugin does, to the end."""
    from torch_tb_profiler.profiler.data import RunProfileData

    with tempfile.TemporaryDirectory() as cache:
        data = RunProfileData.parse("worker", "1", str(path), cache)
        data.process()
    kernels = any(e.get("cat") == "kernel" for e in trace["traceEvents"])
    wrong = [] if data.events else ["the plugin found no events"]
    if kernels != data.has_kernel:
        wrong.append(f"the plugin found {'no ' if kernels else ''}kernels")
    return wrong


def read_with_hta(path: Path, trace: dict[str, Any]) -> list[str]:
    """Parse a trace as Holistic Trace Analysis does, and count its events."""
    from hta.common.trace_parser import parse_trace_dataframe
    from hta.configs.parser_config import ParserConfig

    _, frame, _ = parse_trace_dataframe(str(path), ParserConfig.get_default_cfg())
    wanted = {"cpu_op", "user_annotation", "kernel", "cuda_runtime"}
    kept = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in wanted]
    if len(frame) < len(kept):
        return [f"Holistic Trace Analysis found {len(frame)} of at least {len(kept)} events"]
    return []


def read_with_perfetto(path: Path, trace: dict[str, Any]) -> list[str]:
    """Load a trace into Perfetto's trace processor; every event must be a slice there.

    Raises:
        RuntimeError: The trace processor, which is fetched on first use, is not available.
    """
    from perfetto.trace_processor import TraceProcessor

    try:
        processor = TraceProcessor(trace=str(path))
    except Exception as error:
        raise RuntimeError(f"Perfetto's trace processor cannot be started: {error}") from error
    with contextlib.closing(processor):
        (slices,) = processor.query("select count(*) as n from slice")
        errors = "select name, value from stats where severity != 'info' and value > 0"
        wrong = [f"Perfetto reports {row.name}: {row.value}" for row in processor.query(errors)]
    complete = sum(e.get("ph") == "X" for e in trace["traceEvents"])
    if slices.n < complete:
        wrong.append(f"Perfetto found {slices.n} of {complete} events")
    return wrong


READERS: dict[str, Callable[[Path, dict[str, Any]], list[str]]] = {
    "plugin": read_with_plugin,
    "hta": read_with_hta,
    "perfetto": read_with_perfetto,
}


def faults(path: Path, readers: Sequence[str], gpu: bool) -> list[str]:
    """What is wrong with a trace.

    Raises:
        ImportError: A reader is not installed.
        RuntimeError: It cannot be started.
    """
    from memory_test.torch_profile.traces import check_trace, read_trace

    try:
        trace = read_trace(path)
    except ValueError as error:
        return [str(error)]
    wrong = check_trace(trace, needs_kernels=gpu)
    for name in readers:
        wrong += READERS[name](path, trace)
    return wrong


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"))
    parser.add_argument("--reader", nargs="+", choices=sorted(READERS), default=[])
    parser.add_argument("--gpu", action="store_true", help="each trace must have kernels")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Check all traces below a folder."""
    from memory_test.torch_profile.traces import find_traces

    args = parse(argv)
    paths = find_traces(args.folder) if args.folder.is_dir() else []
    if not paths:
        print(f"{args.folder}: no traces; run profiling_script.py first", file=sys.stderr)
        return EXIT_USAGE
    failed = 0
    logging.getLogger("hta").setLevel(logging.ERROR)
    for path in paths:
        try:
            wrong = faults(path, args.reader, args.gpu)
        except (ImportError, RuntimeError) as error:
            needed = " ".join(PACKAGES[name] for name in args.reader)
            print(f"a reader cannot be used ({error}): pip install {needed}", file=sys.stderr)
            return EXIT_USAGE
        failed += bool(wrong)
        print(f"{path.parent.name}: {'; '.join(wrong) or 'sound'}")
    print(f"{failed} of {len(paths)} traces FAILED" if failed else f"{len(paths)} traces PASSED")
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
