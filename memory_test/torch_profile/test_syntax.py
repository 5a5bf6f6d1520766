"""Check the installation before a long run: Python, the files of this folder, packages.

    python test_syntax.py

Imports neither torch nor opacus unless everything else is in order. The exit status is 0 if the
scripts can run.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MINIMUM_PYTHON = (3, 10)
# What each file must define for the others.
EXPECTED = {
    "model.py": {"Shape", "Block", "ProfiledTransformer", "build_model"},
    "trainers.py": {"Trainer", "StandardTrainer", "DPSGDTrainer", "DPGhostClippingTrainer"},
    "phases.py": {"Ranges", "watch_private_step"},
    "traces.py": {"PhaseMap", "check_trace", "read_trace"},
    "kernel_kinds.py": {"kind_of", "kernels_of", "summary"},
    "recording.py": {"record", "measure_times", "snapshot"},
    "snapshots.py": {"memory_summary", "record_snapshot"},
    "report.py": {"write_report", "write_scalars"},
    "profiling_script.py": {"main", "parse"},
    "check_traces.py": {"main", "faults"},
}
OPTIONAL = ("tensorboard", "matplotlib")


def faults_of_files(folder: Path) -> Iterator[str]:
    """Files that are missing, do not parse, or lack a definition."""
    for name, wanted in EXPECTED.items():
        path = folder / name
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        except SyntaxError as error:
            yield f"{name}: line {error.lineno}: {error.msg}"
            continue
        defined = {n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
        if missing := wanted - defined:
            yield f"{name}: does not define {', '.join(sorted(missing))}"


def faults_of_packages() -> Iterator[str]:
    """Packages that cannot be imported."""
    sys.path.append(str(ROOT))
    for name, how in (("torch", "pip install 'torch>=2.11'"), ("opacus", "pip install -e ../..")):
        try:
            importlib.import_module(name)
        except ImportError as error:
            yield f"{name}: {error}: {how}"


def notes() -> Iterator[str]:
    """What is missing but not needed."""
    for name in OPTIONAL:
        if importlib.util.find_spec(name) is None:
            yield f"{name} is not installed: pip install {name} (the scripts run without it)"
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        yield "no GPU: --mode=profile will run the small model on the CPU"


def main() -> int:
    """Print what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quiet", action="store_true", help="print only what is wrong")
    args = parser.parse_args()
    wrong = []
    if sys.version_info < MINIMUM_PYTHON:
        needed = ".".join(map(str, MINIMUM_PYTHON))
        wrong.append(f"Python {sys.version.split()[0]}: at least {needed} is needed")
    wrong += faults_of_files(HERE)
    wrong += [] if wrong else faults_of_packages()
    for line in wrong:
        print(line, file=sys.stderr)
    if not args.quiet:
        for line in notes():
            print(line)
    if not wrong and not args.quiet:
        version = importlib.metadata.version("torch")
        print(f"{len(EXPECTED)} files and the packages are in order (torch {version})")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
