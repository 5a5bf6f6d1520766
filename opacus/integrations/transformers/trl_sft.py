"""TRL's SFTTrainer, private."""

from __future__ import annotations

from trl import SFTTrainer

from opacus.integrations.transformers.mixin import DPTrainerMixin


class DPSFTTrainer(DPTrainerMixin, SFTTrainer):
    """An ``SFTTrainer`` that trains with differential privacy; see :class:`DPTrainerMixin`.

    The loss is the mean over an example's own labelled tokens (TRL's is one over the tokens of
    the batch). Evaluation is TRL's own.
    """
