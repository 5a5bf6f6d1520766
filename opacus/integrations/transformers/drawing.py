"""What a private Trainer draws its batches from."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from transformers.trainer_utils import seed_worker

from opacus.core.privacy.key import SystemGenerator, reproducible_from_environment
from opacus.data_loader import DPDataLoader
from opacus.integrations.transformers.arguments import DPArguments
from opacus.integrations.transformers.batches import ChunkedCollate
from opacus.integrations.transformers.refusals import refuse_data


class PrivateData:
    """Overrides of a Trainer's own; a base of ``DPTrainerMixin``.

    Guarantee: each example of ``train_dataset``, as it is when :meth:`train` is called, joins a
    step by its own coin toss.
    """

    args: Any
    privacy: DPArguments
    train_dataset: Any
    data_collator: Any
    _accumulation: int
    _remove_unused_columns: Any
    _get_collator_with_removed_columns: Any
    _get_train_sampler: Any

    @property
    def _size(self) -> int:
        return len(self.train_dataset)

    @property
    def expected_batch_size(self) -> int:
        """Examples that a step is expected to draw, in all processes together."""
        if self.privacy.expected_batch_size is not None:
            return self.privacy.expected_batch_size
        each = self.args.per_device_train_batch_size * self._accumulation
        return int(each * max(1, self.args.world_size))

    def _check_batch(self) -> None:
        if self.expected_batch_size > self._size:
            raise ValueError(
                f"a step is expected to draw {self.expected_batch_size} examples "
                "(expected_batch_size, or else per_device_train_batch_size * "
                f"gradient_accumulation_steps * processes), and train_dataset has {self._size}"
            )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Loader of logical batches; :meth:`train` makes it private."""
        refuse_data(self.train_dataset)  # it may be another one than at first
        self._check_batch()
        dataset, collate = self.train_dataset, self.data_collator
        tables = sys.modules.get("datasets")  # not needed; one that was made there is loaded
        if tables is not None and isinstance(dataset, tables.Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        args = self.args
        settings: dict[str, Any] = {
            "collate_fn": ChunkedCollate(collate, args.per_device_train_batch_size),
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "worker_init_fn": partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            ),
        }
        if not self.privacy.poisson_sampling:
            sampler = self._get_train_sampler(dataset)
            return DataLoader(dataset, self.expected_batch_size, sampler=sampler, **settings)
        # Not from the global generator, which Trainer seeds: coin tosses must not be known.
        coins = None if reproducible_from_environment() else SystemGenerator()
        rate = self.expected_batch_size / self._size
        return DPDataLoader(dataset, sample_rate=rate, generator=coins, **settings)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Expected number of examples of a step."""
        return self.expected_batch_size

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: Any
    ) -> tuple[list[Any], None]:
        """The next logical batch; the number of its tokens must not scale any loss."""
        drawn = (next(epoch_iterator, None) for _ in range(num_batches))
        return [batch for batch in drawn if batch is not None], None
