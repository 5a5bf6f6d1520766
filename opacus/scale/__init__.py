"""Memory and time of a private training step, predicted without a GPU.

``python -m opacus.scale --model llama3-70b --gpus 256 --seq 8192 --mode ghost_fsdp_bk``

The predictions rest on measured rates (``rates.json``) and are checked against measured
steps of a 1B model on one and two cards. Above that they extrapolate.
"""

from __future__ import annotations

from opacus.scale.prediction import Prediction, predict
from opacus.scale.rates import Rates, rates_of
from opacus.scale.run import MODES, OPTIMIZERS, Run
from opacus.scale.shapes import SHAPES, LlamaShape, shape_of

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
