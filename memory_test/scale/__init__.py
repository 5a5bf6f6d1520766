"""Memory and time of a private training step, predicted without a GPU.

``python -m memory_test.scale --model llama3-70b --gpus 256 --seq 8192 --mode ghost_fsdp_bk``

The predictions rest on measured rates (``rates.json``) and are checked against measured
steps of a 1B model on one and two cards. Above that they extrapolate.
"""

from __future__ import annotations

from memory_test.scale.prediction import Prediction, predict
from memory_test.scale.rates import Rates, rates_of
from memory_test.scale.run import MODES, OPTIMIZERS, Run
from memory_test.scale.shapes import SHAPES, LlamaShape, shape_of

__all__ = [
    "MODES",
    "OPTIMIZERS",
    "SHAPES",
    "LlamaShape",
    "Prediction",
    "Rates",
    "Run",
    "predict",
    "rates_of",
    "shape_of",
]
