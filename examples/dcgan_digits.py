"""Trains a small convolutional GAN that draws digits, with differential privacy.

    python examples/dcgan_digits.py
    python examples/dcgan_digits.py --epsilon 5 --grad-sample-mode ghost --images drawn.png

Two networks: only the discriminator sees real images, so only its training is made private. The
generator learns from the discriminator, which is post-processing and costs nothing more; drawing
any number of images is free, too.

The discriminator's loss has two terms, from two forward passes: real images, and as many fakes of
the same digits. Both belong to the sample: the gradient that is clipped is that of the pair.

The score: a plain classifier is trained on drawn images alone, then tested on real ones.
At epsilon 10, delta 1e-4 it is right in 80.3% (75.6% to 84.7%), over the seeds 0 to 5, on a CPU.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from arguments import positive, probability
from classifier import (
    Data,
    Outcome,
    Private,
    accuracy,
    alone,
    check,
    make_private,
    option_parser,
    report,
)
from digits import CLASSES, DELTA, SIDE, load_digits
from reporting import Reporter
from runtime import Runtime
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NOISE = 16  # numbers that an image is drawn from
DRAWN = 2000  # images that the score is taken on


class Generator(nn.Module):
    """Draws images. Group norm instead of batch norm: an image is drawn alone."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NOISE + CLASSES, channels * 4),
            nn.Unflatten(1, (channels, 2, 2)),
            nn.ReLU(),
            nn.ConvTranspose2d(channels, channels, kernel_size=4, stride=2, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.ConvTranspose2d(channels, 1, kernel_size=4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Images ``[B, 1, 8, 8]`` of the digits ``labels`` ``[B]`` from noise ``[B, 16]``."""
        return self.layers(torch.cat([noise, F.one_hot(labels, CLASSES).float()], dim=1))

    def draw(self, labels: Tensor) -> Tensor:
        """Images of these digits, from fresh noise."""
        return self(torch.randn(len(labels), NOISE, device=labels.device), labels)


class Discriminator(nn.Module):
    """Tells real images from drawn ones, with one linear head for each digit.

    Features are shared: what the noise leaves of a signal is too weak for ten networks.
    """

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.LeakyReLU(0.2),
            nn.AvgPool2d(2),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.LeakyReLU(0.2),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * (SIDE // 4) ** 2, CLASSES),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Logits ``[B]``, high for real, of images ``[B, 1, 8, 8]`` of the digits ``labels``."""
        return (self.layers(images) * F.one_hot(labels, CLASSES)).sum(dim=1)


class Trainer:
    """Trains both networks by turns.

    Args:
        args: Options of the script.
        train: Private images and labels.
        runtime: This process.
    """

    def __init__(self, args: argparse.Namespace, train: TensorDataset, runtime: Runtime) -> None:
        self.device = runtime.device
        self.generator = Generator().to(self.device)
        # What is drawn with in the end: a running mean of the generator.
        self.mean = copy.deepcopy(self.generator)
        self.decay = args.decay
        self.batch_size = args.batch_size
        self.optimizer = torch.optim.Adam(
            self.generator.parameters(), lr=args.generator_lr, betas=(0.5, 0.999)
        )
        discriminator = Discriminator().to(self.device)
        self.criterion = nn.BCEWithLogitsLoss()
        self.private: Private = make_private(
            args,
            discriminator,
            torch.optim.SGD(discriminator.parameters(), lr=args.lr, momentum=0.9),
            train,
            criterion=self.criterion,
        )

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step of either network, on one batch of real images; it may be empty."""
        images, labels = images.to(self.device), labels.to(self.device)
        self._discriminator_step(images, labels)
        self._generator_step()

    def _discriminator_step(self, images: Tensor, labels: Tensor) -> None:
        private = self.private
        with torch.no_grad():
            drawn = self.generator.draw(labels)
        # A real image and the drawn one at its place are one sample: clipped together.
        real = private.model(images, labels)
        fake = private.model(drawn, labels)
        loss = private.criterion(real, torch.ones_like(real))
        loss = loss + private.criterion(fake, torch.zeros_like(fake))
        loss.backward()
        private.optimizer.step()
        private.optimizer.zero_grad()

    def _generator_step(self) -> None:
        judge = self.private.model.requires_grad_(False)  # it does not learn from this loss
        labels = torch.randint(CLASSES, (self.batch_size,), device=self.device)
        judged = judge(self.generator.draw(labels), labels)
        self.optimizer.zero_grad()
        self.criterion(judged, torch.ones_like(judged)).backward()
        self.optimizer.step()
        judge.requires_grad_(True)
        with torch.no_grad():
            pairs = zip(self.mean.parameters(), self.generator.parameters(), strict=True)
            for mean, now in pairs:
                mean.lerp_(now, 1 - self.decay)


@torch.no_grad()
def draw(generator: Generator, count: int, runtime: Runtime) -> TensorDataset:
    """As many images of each digit, with their labels."""
    labels = torch.arange(count, device=runtime.device) % CLASSES
    return TensorDataset(generator.draw(labels), labels)


def score(drawn: TensorDataset, test: TensorDataset, runtime: Runtime) -> float:
    """Accuracy on real images of a classifier that saw drawn ones only."""
    images, labels = drawn.tensors
    judge = nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    ).to(runtime.device)
    optimizer = torch.optim.Adam(judge.parameters(), lr=3e-3)
    for _ in range(5):
        for part in torch.randperm(len(labels)).split(100):
            optimizer.zero_grad()
            F.cross_entropy(judge(images[part]), labels[part]).backward()
            optimizer.step()
    return accuracy(judge, test, runtime)


def save_images(drawn: TensorDataset, path: str) -> None:
    """Write the first hundred images, a column for each digit."""
    from matplotlib import image

    rows = drawn.tensors[0][:100].reshape(10, CLASSES, SIDE, SIDE).cpu()
    image.imsave(path, rows.permute(0, 2, 1, 3).reshape(10 * SIDE, -1), cmap="gray_r")


def train(args: argparse.Namespace, data: Data, runtime: Runtime) -> Outcome:
    """Train, draw, and report."""
    reporter = Reporter(runtime)
    trainer = Trainer(args, data.train, runtime)
    private = trainer.private
    reporter.say(f"noise multiplier {private.optimizer.noise_multiplier:.3f}")
    for epoch in range(1, args.epochs + 1):
        title = f"epoch {epoch}/{args.epochs}"
        for batch in reporter.progress(private.loader, len(private.loader), title):
            trainer.step(*batch)
        if epoch % 10 == 0 or epoch == args.epochs:
            spent = private.engine.get_epsilon(args.delta)
            reporter.say(f"{title}  epsilon {spent:.2f}")
    drawn = draw(trainer.mean, DRAWN, runtime)
    if args.images:
        save_images(drawn, args.images)
        print(f"wrote drawn images to {args.images}")
    return report(args, private.engine, score(drawn, data.test, runtime), reporter)


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the example with these options."""
    parser = option_parser(__doc__, epsilon=10.0, delta=DELTA, epochs=40, batch_size=256, lr=0.2)
    parser.add_argument(
        "--generator-lr", type=positive(float), default=2e-3, help="of the generator"
    )
    parser.add_argument("--decay", type=probability, default=0.99, help="of the generator's mean")
    parser.add_argument("--images", metavar="FILE", help="save a sheet of drawn images")
    args = parser.parse_args(argv)
    data = load_digits()
    check(parser, args, data)
    return train(args, data, alone(args))


if __name__ == "__main__":
    main()
