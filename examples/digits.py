"""Handwritten digits, 8 x 8 pixels, as scikit-learn ships them, and a small CNN for them."""

from __future__ import annotations

import torch
from classifier import Data
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 10
SIDE = 8

# For all scripts on these digits: below 1 / 1437 training images.
DELTA = 1e-4

_TEST_ROWS = 360
_SPLIT_SEED = 0


def load_digits() -> Data:
    """1437 images to train on and 360 to test with; always the same split.

    Images are float32, ``[N, 1, 8, 8]``, from -1 (white) to 1 (black); labels int64, ``[N]``.

    Raises:
        SystemExit: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from error
    shipped = datasets.load_digits()
    images = torch.tensor(shipped.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(shipped.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    test, train = order[:_TEST_ROWS], order[_TEST_ROWS:]
    return Data(
        train=TensorDataset(images[train], labels[train]),
        test=TensorDataset(images[test], labels[test]),
    )


class DigitsCNN(nn.Module):
    """Two convolutions and two linear layers.

    Bounded activations (tanh) suit clipped gradients better than ReLU (arXiv 2007.14191).
    """

    def __init__(self, channels: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(2 * channels * (SIDE // 4) ** 2, hidden),
            nn.Tanh(),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, 10]`` of images ``[B, 1, 8, 8]``."""
        return self.head(self.features(images))
