"""Several processes of a script without torchrun's own traceback at the end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

REFUSED = 2  # exit status of a script that has said which argument is wrong


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(processes: int, argv: Sequence[str]) -> None:
    """Run this script in several processes, as ``torchrun --standalone`` does; does not return.

    After Ctrl-C, or if the script refuses its arguments, the last lines are those of the script.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.ERROR)  # torchrun's own, in this process alone
    try:
        run.main(["--standalone", f"--nproc_per_node={processes}", sys.argv[0], *argv])
    except SignalException:
        sys.exit(130)
    except ChildFailedError as error:
        status = max(failure.exitcode for failure in error.failures.values())
        if status != REFUSED:
            print(error, file=sys.stderr)  # torchrun's report, which ends with the first error
        sys.exit(status or 1)
    sys.exit(0)
