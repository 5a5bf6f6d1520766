"""What makes a Trainer private: placement, data, loss, step, logs and checkpoints."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers.trainer
from torch import Tensor
from transformers import TrainingArguments

from opacus.accountants.utils import get_noise_multiplier
from opacus.core.isolation.check import VARIABLE
from opacus.core.platform.switches import switched_on
from opacus.core.privacy.key import reproducible_from_environment
from opacus.data.rates import sample_rate_of
from opacus.data_loader import CollateFnWithEmpty
from opacus.integrations.transformers import checkpoints
from opacus.integrations.transformers.adapters import add_penalties
from opacus.integrations.transformers.arguments import DPArguments
from opacus.integrations.transformers.card import Guarantee
from opacus.integrations.transformers.drawing import PrivateData
from opacus.integrations.transformers.logits import computes_the_models_loss, drop_logits
from opacus.integrations.transformers.logs import with_mean
from opacus.integrations.transformers.lone_examples import EXACT, ROUGH, refuse_dependence
from opacus.integrations.transformers.losses import by_function, loss_of
from opacus.integrations.transformers.overrides import (
    chunked_collate,
    refuse_overridden_loss,
    refuse_replaced_methods,
)
from opacus.integrations.transformers.placement import (
    compile_blocks,
    placed,
    plugin_of,
    refuse_plugin,
    reshard,
)
from opacus.integrations.transformers.refusals import (
    refuse_arguments,
    refuse_data,
    refuse_model,
)
from opacus.integrations.transformers.saving import PrivateSaving
from opacus.integrations.transformers.step import PrivateStep
from opacus.losses import LossInHead, is_without_logits
from opacus.privacy_engine import PrivacyEngine

logger = logging.getLogger(__name__)


class DPTrainerMixin(PrivateData, PrivateStep, PrivateSaving):
    """Put before a Trainer among the bases of a class, it makes the Trainer private.

    ``class DPTrainer(DPTrainerMixin, Trainer)``; also before users' own Trainers. What is as it
    was: arguments, callbacks, evaluation, schedules, checkpoints, the saved model. What differs:

    - One step is one Poisson batch. ``per_device_train_batch_size`` is the largest number of
      examples that are in memory at once, and ``gradient_accumulation_steps`` says how many times
      that a process is expected to draw a step, unless ``privacy.expected_batch_size`` does.
    - The loss is one an example: the mean over its own tokens. It comes from
      :meth:`per_sample_loss`, which can be overridden, not from ``compute_loss``.
    - ``max_grad_norm`` is not used; the clipping norm is that of ``privacy``.
    - Logs have ``epsilon``; checkpoints ``privacy.pt``; model cards a section on the guarantee.

    Several processes: as with Trainer, by ``torchrun`` or ``accelerate launch``; replicated, or
    sharded by FSDP2 with ``fsdp=True``.

    Args:
        args, kwargs: Those of the Trainer.
        privacy: Budget, clipping and mode.

    Raises:
        ValueError: An argument of the Trainer cannot be private; it is named with the reason.
        TypeError: The Trainer has a loss of its own that is one for the batch.
    """

    # Rows that an example has in the model's layers.
    rows_per_example = 1

    def __init__(self, *args: Any, privacy: DPArguments | None = None, **kwargs: Any) -> None:
        if not isinstance(privacy, DPArguments):
            raise TypeError(
                "privacy=DPArguments(target_epsilon=..., delta=...) is needed, got "
                f"{type(privacy).__name__}"
            )
        refuse_overridden_loss(type(self), DPTrainerMixin)
        refuse_replaced_methods(type(self), DPTrainerMixin, poisson=privacy.poisson_sampling)
        for value in (*args, kwargs.get("args")):
            if isinstance(value, TrainingArguments):
                refuse_arguments(value, privacy)
        self.privacy = privacy
        self._private: Any = None  # the hooks object, while training
        self._criterion: Any = None
        self._in_head: LossInHead | None = None
        self._mode = privacy.grad_sample_mode
        self._norms: list[Tensor] = []
        self._blank: CollateFnWithEmpty | None = None
        super().__init__(*args, **kwargs)
        self._check_built()
        # Trainer's own accumulation would sum several Poisson batches.
        self.args = copy.copy(self.args)
        self._accumulation = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = 1
        self._filters_losses = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = False  # see _filtered
        # The model is placed here; see `placement`.
        self._plugin = plugin_of(self.accelerator, self.args)
        refuse_plugin(self._plugin)
        self.is_fsdp_enabled = False
        self.privacy_engine = PrivacyEngine(
            accountant=privacy.accountant, secure_mode=privacy.secure_mode
        )
        self.delta = privacy.delta_for(self._size)
        self._check_batch()
        self._sigma = privacy.noise_multiplier
        self._spent: tuple[list[Any], float] = ([], 0.0)  # of a history, what it comes to
        if privacy.delta is None:
            logger.warning("delta was not given: a tenth of 1/%d, %.3g", self._size, self.delta)

    def _check_built(self) -> None:
        refuse_arguments(self.args, self.privacy)
        refuse_data(self.train_dataset)
        refuse_model(self.model)
        if not hasattr(type(self), "_prepare_for_training"):
            raise ImportError("private training needs transformers 5.17 or newer")
        if self.args.label_smoothing_factor and is_without_logits(self._bare_model()):
            raise ValueError(
                "label_smoothing_factor: a model without logits computes its loss itself: use "
                "without_logits(model, label_smoothing=...)"
            )
        overridden = type(self).per_sample_loss is not DPTrainerMixin.per_sample_loss
        if self.compute_loss_func is None and not overridden:
            loss_of(self._bare_model())

    def _bare_model(self) -> Any:
        get_base_model = getattr(self.model, "get_base_model", None)
        return self.model if get_base_model is None else get_base_model()

    # --- what users look at ---

    def get_epsilon(self) -> float:
        """Epsilon of all steps so far, at :attr:`delta`."""
        history = self.privacy_engine.accountant.history
        if history != self._spent[0]:
            self._spent = ([*history], float(self.privacy_engine.get_epsilon(self.delta)))
        return self._spent[1]

    def guarantee(self) -> Guarantee:
        """What has been guaranteed so far, and how; ``str`` of it goes into the model card."""
        privacy = self.privacy
        return Guarantee(
            epsilon=self.get_epsilon(),
            delta=self.delta,
            steps=len(self.privacy_engine.accountant),
            examples=self._size,
            expected_batch=self.expected_batch_size,
            sigma=self._sigma or 0.0,
            clipping_norm=privacy.clipping_norm,
            unit=privacy.privacy_unit,
            mode=self._mode,
            accountant=privacy.accountant,
            poisson=privacy.poisson_sampling,
            seeded=not privacy.secure_mode and reproducible_from_environment(),
            norms_logged=privacy.log_private_gradient_norms,
        )

    # --- what users may override ---

    def model_outputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Run the model on a physical batch.

        Args:
            model: As it is wrapped.
            inputs: The collated batch, on the device.

        Returns:
            What :meth:`per_sample_loss` is given: outputs and inputs, by name. Only tensors with
            one row an example belong there.

        Raises:
            TypeError: The outputs have no names.
        """
        bare = self._bare_model()
        names = () if is_without_logits(bare) else self.label_names
        own = {k: v for k, v in inputs.items() if k not in names}
        if getattr(bare.config, "is_encoder_decoder", False) and "decoder_input_ids" not in own:
            shift = getattr(bare, "prepare_decoder_input_ids_from_labels", None)
            if shift is not None:
                own["decoder_input_ids"] = shift(labels=inputs["labels"])
        if "use_cache" in inspect.signature(bare.forward).parameters:
            own.setdefault("use_cache", False)  # of no use in training
        outputs = model(**own)
        if not isinstance(outputs, Mapping):
            raise TypeError(
                f"the model returned {type(outputs).__name__}, which has no names: set "
                "model.config.return_dict=True, or override model_outputs"
            )
        return {k: v for k, v in outputs.items() if isinstance(v, Tensor)}, inputs

    def per_sample_loss(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
        """One loss an example, ``[B]``, independent of the other examples of the batch.

        By default ``compute_loss_func`` of each example alone, or else the loss of the model's
        head as a mean over the example's own tokens. A causal language model computes that without
        its logits where it can: ``outputs`` are then the losses, of this method as it is here.

        Args:
            outputs: Of the model, as attributes too.
            inputs: The batch, labels included.
        """
        if self.compute_loss_func is not None:
            shifted = getattr(self, "_loss_shifts_labels", False)
            return by_function(self.compute_loss_func, outputs, inputs, shifted)
        if is_without_logits(self._bare_model()):
            loss_per_example: Tensor = outputs["loss"]
            return loss_per_example
        loss = loss_of(self._bare_model())
        return loss(outputs, inputs, smoothing=self.args.label_smoothing_factor)

    # --- becoming private ---

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; afterwards the model is without hooks."""
        try:
            return with_mean(super().train(*args, **kwargs))  # type: ignore[misc]
        finally:
            self._undo()

    def _undo(self) -> None:
        if self._private is not None:
            self._private.cleanup()
            self._private = self._criterion = None
            self.optimizer = self.optimizer.original_optimizer
        if self._in_head is not None:
            self._in_head.undo()
        self._in_head = None

    def _place(self) -> None:
        """Replicate or shard the model, unless that has been done."""
        if self.model_wrapped is self.model:
            if self.args.torch_compile:
                compile_blocks(
                    self.model, self.args.torch_compile_backend, self.args.torch_compile_mode
                )
            device, bf16 = self.args.device, self.args.bf16
            self.model_wrapped = placed(self.model, self._plugin, device, bf16)
        if not any(known is self.model for known in self.accelerator._models):
            self.accelerator._models.append(self.model)  # so that it is not wrapped again

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        collate = chunked_collate(train_dataloader)
        saved = None
        if resume_from_checkpoint is not None:
            saved = checkpoints.read_privacy(resume_from_checkpoint)
        self.delta = min(self.delta, self.privacy.delta_for(self._size))
        self._start_logs()
        if self.args.tf32 is False:  # accelerate allows it for compiled models, whatever is asked
            torch.backends.cuda.matmul.fp32_precision = "ieee"
        self._place()
        self.model.train()  # `from_pretrained` gives it in eval mode; a step would do this later
        if self.compute_loss_func is None and computes_the_models_loss(type(self), DPTrainerMixin):
            bare, smoothing = self._bare_model(), self.args.label_smoothing_factor
            self._in_head = drop_logits(self.model, bare, self.args.device, smoothing)
        self._look_at_examples(train_dataloader.dataset, collate)
        reshard(self.model)
        self.create_optimizer()
        loader = self._make_private(max_steps, train_dataloader)
        self.create_scheduler(num_training_steps=max_steps)
        if saved is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            checkpoints.load_privacy(saved, self.privacy_engine, self.optimizer)
        self._check_budget(max_steps, loader, resumed=saved is not None)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        return self.model_wrapped, loader

    def _look_at_examples(self, dataset: Any, collate: Any) -> None:
        """See ``lone_examples``: batches of several examples must not join them."""
        alone = self.args.per_device_train_batch_size == 1 and not hasattr(dataset, "__getitems__")
        if alone or not switched_on(VARIABLE, default=True):
            return
        products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
        exact = all(one.fp32_precision in ("none", "ieee") for one in products)
        exact &= not self.args.bf16
        exact &= all(p.dtype == torch.float32 for p in self.model.parameters())
        # Tokens of a causal model do not see padding; its logits might not fit into memory.
        losses = None if is_without_logits(self._bare_model()) else self._losses_alone
        refuse_dependence(dataset, collate, losses, EXACT if exact else ROUGH)

    def _make_private(self, max_steps: int, loader: Any) -> Any:
        if max_steps < 1:
            raise ValueError(
                f"no step would be taken (max_steps={self.args.max_steps}, "
                f"num_train_epochs={self.args.num_train_epochs}): give at least one"
            )
        if self._sigma is None:
            self._sigma = get_noise_multiplier(
                target_epsilon=self.privacy.target_epsilon,
                target_delta=self.delta,
                sample_rate=sample_rate_of(loader),
                steps=max_steps,
                accountant=self.privacy.accountant,
            )
        mode = self.privacy.grad_sample_mode
        private, self.optimizer, *criterion, loader = self.privacy_engine.make_private(
            module=self.model_wrapped,
            optimizer=self.optimizer,
            criterion=self._losses,
            data_loader=loader,
            noise_multiplier=self._sigma,
            max_grad_norm=self.privacy.clipping_norm,
            poisson_sampling=self.privacy.poisson_sampling,
            grad_sample_mode=mode,
            wrap_model=False,
        )
        self._private, self._private_loader = private, loader
        add_penalties(self.model, self.optimizer)
        lone = getattr(getattr(private, "_recorder", None), "lone", None)
        if lone is not None and self.rows_per_example > 1:
            lone.rule_out("an example is several rows of the model's layers")
        self._criterion = criterion[0] if criterion else None
        choice = getattr(private, "auto_choice", None)
        self._mode = mode if choice is None else choice.mode
        return loader

    def _check_budget(self, max_steps: int, loader: Any, *, resumed: bool) -> None:
        """Let a resumed run end within its budget, by more noise if its steps are others now."""
        target, planned = self.privacy.target_epsilon, self._sigma
        if target is None:
            return
        taken = len(self.privacy_engine.accountant)
        left = max_steps - self.state.global_step
        assert planned is not None

        def total(sigma: float) -> float:
            rate = sample_rate_of(loader)
            return checkpoints.epsilon_after(
                self.privacy_engine, left, sigma=sigma, rate=rate, delta=self.delta
            )

        end = total(planned)
        if end <= target * 1.001:
            return
        if resumed and (enough := checkpoints.enough_noise(total, target, planned)):
            logger.warning(
                "the checkpoint has %d steps of another noise or batch size: the %d that are left "
                "get noise_multiplier=%.4g, not %.4g, so that target_epsilon=%g is not exceeded",
                taken, left, enough, planned, target,
            )  # fmt: skip
            self._sigma = self.optimizer.noise_multiplier = enough
            return
        self._undo()
        raise ValueError(
            f"{taken} steps have been taken{' in the checkpoint' if resumed else ''}, and {left} "
            f"more at noise_multiplier={planned:.4g} would end at epsilon {end:.4g}, above "
            f"target_epsilon={target:g}. Train fewer steps, or raise target_epsilon"
        )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a resumed epoch goes on with new draws, so nothing is left out.

        Trainer looks at ``max_steps`` after a step: a finished run that is resumed would take one
        more, which its noise was not made for.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        if not self.privacy.poisson_sampling:
            return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]
        skip = transformers.trainer.skip_first_batches
        transformers.trainer.skip_first_batches = lambda loader, number: loader
        try:
            return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]
        finally:
            transformers.trainer.skip_first_batches = skip

    # --- evaluation ---

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a model that is to be sharded is, before."""
        if self._plugin is not None:
            self._place()
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "hyperparameter_search would train on the same data in each trial, and the choice "
            "among them would be released without being counted: make a trainer for each trial "
            "and add up what they spend"
        )
