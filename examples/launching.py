"""Several processes of a script without torchrun's own traceback at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(processes: int, argv: Sequence[str]) -> None:
    """Run this script in so many processes, as ``torchrun --standalone`` does; does not return.

    After Ctrl-C the last lines are those of the script.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        run.main(["--standalone", f"--nproc_per_node={processes}", sys.argv[0], *argv])
    except SignalException:
        sys.exit(130)
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # torchrun's report, which ends with the first error
        sys.exit(max(failure.exitcode for failure in error.failures.values()) or 1)
    sys.exit(0)
