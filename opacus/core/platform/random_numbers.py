"""Random numbers that programs draw outside torch."""

from __future__ import annotations

import random
import sys
from typing import Any


def program_numbers() -> object:
    """The states of the generators of Python and NumPy that all programs share.

    They are others once a number was drawn.
    """
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    other = None if numpy is None else repr(numpy.get_state(legacy=False))
    return random.getstate(), other
