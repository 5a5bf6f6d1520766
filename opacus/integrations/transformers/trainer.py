"""Hugging Face's Trainer, private."""

from __future__ import annotations

import transformers

from opacus.integrations.transformers.mixin import DPTrainerMixin


class DPTrainer(DPTrainerMixin, transformers.Trainer):
    """A ``Trainer`` that trains with differential privacy; see :class:`DPTrainerMixin`.

    Example::

        trainer = DPTrainer(
            model=model, args=TrainingArguments("out", per_device_train_batch_size=8,
                                                gradient_accumulation_steps=16),
            train_dataset=data, processing_class=tokenizer,
            privacy=DPArguments(target_epsilon=8, delta=1e-6),
        )
        trainer.train()
    """
