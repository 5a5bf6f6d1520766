"""Trains the CNN of `digits_cnn.py` with PyTorch Lightning.

    python examples/lightning_digits.py

Three things make a Lightning run private:

* the data module is wrapped in `DPLightningDataModule`, which draws batches by Poisson sampling;
* `configure_optimizers` calls the privacy engine and returns the private optimizer;
* `wrap_model=False`: the model keeps its class and the names of its weights, so that Lightning's
  checkpoints load without Opacus.

Test accuracy at epsilon 3, delta 1e-4: 91.5% (90.8% to 92.2%) over the seeds 0 to 4, on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from classifier import Data, Outcome, alone, check, option_parser, report
from digits import DELTA, DigitsCNN, load_digits
from reporting import Reporter
from torch import Tensor
from torch.utils.data import DataLoader

from opacus import PrivacyEngine

try:
    import pytorch_lightning as pl
except ImportError as error:
    raise SystemExit("this example needs Lightning: pip install pytorch-lightning") from error

from opacus.lightning import DPLightningDataModule

# Ghost modes work, too: `training_step` then uses their criterion (docs/lightning.md).
MODES = ("hooks", "functorch")


class DigitsModule(pl.LightningDataModule):
    """The digits, as any Lightning data module: nothing here knows of privacy."""

    def __init__(self, data: Data, batch_size: int) -> None:
        super().__init__()
        self.data = data
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches to train on."""
        return DataLoader(self.data.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """All test images at once."""
        return DataLoader(self.data.test, len(self.data.test))


class PrivateDigits(pl.LightningModule):
    """The CNN, its loss, and the optimizer that makes it private.

    Args:
        args: Options of the script.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.model = DigitsCNN()
        self.engine = PrivacyEngine()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plan the noise for all epochs; the loader only tells the size of data and batches."""
        args = self.args
        hooks, optimizer, _ = self.engine.make_private_with_epsilon(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9),
            data_loader=self.trainer.datamodule.train_dataloader(),
            target_epsilon=args.epsilon,
            target_delta=args.delta,
            epochs=args.epochs,
            max_grad_norm=args.max_grad_norm,
            grad_sample_mode=args.grad_sample_mode,
            wrap_model=False,
        )
        self.hooks = hooks
        return optimizer

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean loss of a batch; an empty one counts as a step, too."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def on_train_epoch_end(self) -> None:
        """Show on the bar what has been spent."""
        self.log("epsilon", self.engine.get_epsilon(self.args.delta), prog_bar=True)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Accuracy, after each epoch."""
        images, labels = batch
        right = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, prog_bar=True, batch_size=len(labels))


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the example with these options."""
    parser = option_parser(
        __doc__, modes=MODES, epsilon=3.0, delta=DELTA, epochs=20, batch_size=256, lr=0.2
    )
    args = parser.parse_args(argv)
    data = load_digits()
    check(parser, args, data)
    runtime = alone(args)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="gpu" if runtime.device.type == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        enable_progress_bar=sys.stderr.isatty(),
    )
    model = PrivateDigits(args)
    private_data = DPLightningDataModule(DigitsModule(data, args.batch_size))
    trainer.fit(model, datamodule=private_data)
    scores = trainer.validate(model, datamodule=private_data, verbose=False)
    return report(args, model.engine, scores[0]["accuracy"], Reporter(runtime))


if __name__ == "__main__":
    main()
