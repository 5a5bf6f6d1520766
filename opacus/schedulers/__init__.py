"""Schedulers that change the noise multiplier or the clipping threshold during training."""

from opacus.schedulers.grad_clip_scheduler import (
    ExponentialGradClip,
    LambdaGradClip,
    StepGradClip,
    _GradClipScheduler,
)
from opacus.schedulers.noise_scheduler import (
    ExponentialNoise,
    LambdaNoise,
    StepNoise,
    _NoiseScheduler,
)

__all__ = [
    "ExponentialGradClip",
    "ExponentialNoise",
    "LambdaGradClip",
    "LambdaNoise",
    "StepGradClip",
    "StepNoise",
    "_GradClipScheduler",
    "_NoiseScheduler",
]
