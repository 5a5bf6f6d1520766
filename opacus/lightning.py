"""PyTorch Lightning: a data module that draws Poisson batches."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from opacus.data_loader import DPDataLoader


class DPLightningDataModule(pl.LightningDataModule):
    """Wraps a data module; batches of the training loader are drawn by Poisson sampling.

    Give ``make_private`` its ``train_dataloader()`` in ``configure_optimizers``: steps are then
    compared with the batches that this loader has drawn. On several ranks each draws from its own
    part of the data; tensor-parallel ranks, which share samples, are not supported.

    Args:
        datamodule: The data module to wrap.
        generator: Source of the sampling.
    """

    def __init__(
        self, datamodule: pl.LightningDataModule, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.datamodule = datamodule
        self.generator = generator
        self._training: DPDataLoader | None = None
        self._batches = 0  # of the loader that it was made from

    def prepare_data(self) -> None:
        """As the wrapped module."""
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:  # type: ignore[override]
        """As the wrapped module."""
        self.datamodule.setup(stage)  # type: ignore[arg-type]

    def train_dataloader(self) -> DPDataLoader:
        """The wrapped module's training loader, with Poisson sampling; one for each data set.

        On several ranks all of them must call it: they agree on what each draws.
        """
        plain, known = self.datamodule.train_dataloader(), self._training
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if (
            known is None
            or known.dataset is not plain.dataset
            or self._batches != len(plain)
            or known.distributed != several  # it was asked for before the ranks had met
        ):
            known = self._training = DPDataLoader.from_data_loader(
                plain, generator=self.generator, distributed=several
            )
            self._batches = len(plain)
        return known

    def val_dataloader(self) -> Any:
        """As the wrapped module."""
        return self.datamodule.val_dataloader()

    def test_dataloader(self) -> Any:
        """As the wrapped module."""
        return self.datamodule.test_dataloader()

    def predict_dataloader(self) -> Any:
        """As the wrapped module."""
        return self.datamodule.predict_dataloader()

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """As the wrapped module."""
        return self.datamodule.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """As the wrapped module."""
        return self.datamodule.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """As the wrapped module."""
        return self.datamodule.on_after_batch_transfer(batch, dataloader_idx)
