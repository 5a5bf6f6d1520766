"""Adaptive clipping in ghost modes."""

from opacus.utils.adaptive_clipping.adaptive_clipping_utils import (
    DPLossFastGradientAdaptiveClipping,
    DPTensorFastGradientAdaptiveClipping,
    PrivacyEngineAdaptiveClipping,
)

__all__ = [
    "DPLossFastGradientAdaptiveClipping",
    "DPTensorFastGradientAdaptiveClipping",
    "PrivacyEngineAdaptiveClipping",
]
