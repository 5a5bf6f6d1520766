"""The main entry point: makes a model, an optimizer and a data loader private."""

from __future__ import annotations

import os
import warnings
from typing import Any, BinaryIO, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.checkpoints.one_file import load_training_state, save_training_state
from opacus.core.privacy.key import NOISE
from opacus.core.ranks.layout import Single
from opacus.core.step.modes import AUTO, mode_of
from opacus.data.host_loader import switch_generator
from opacus.data.rates import (
    expected_batch_size_on_rank,
    matching_sample_rate,
    sample_rate_of,
    warn_of_uneven_sampling,
)
from opacus.data.sharding import (
    choose_data_layout,
    follow_mesh,
    repeat_data_loader,
    shard_data_loader,
)
from opacus.data_loader import DPDataLoader
from opacus.engine_accounting import EngineAccounting
from opacus.engine_checks import (
    check_arguments,
    check_noise_source,
    check_parallelism,
    check_privacy_unit,
    check_public_numbers,
    choose,
    is_distributed,
    on_all_ranks,
    say_that_noise_is_seeded,
    warn_of_another_dataset,
)
from opacus.grad_sample import AbstractGradSampleHooks
from opacus.grad_sample import wrap_model as wrap
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.schedulers import _GradClipScheduler, _NoiseScheduler
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.uniform_sampler import SystemGenerator
from opacus.validators.module_validator import ModuleValidator


class PrivacyEngine(EngineAccounting):
    """Adds differential privacy to PyTorch training and counts what it costs.

    Args:
        accountant: How privacy loss is counted: ``"prv"``, ``"rdp"`` or ``"gdp"``.
        secure_mode: Draw sampling and noise by ChaCha20. Slow;
            for the final model.

    Example::

        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0,
        )
        engine.get_epsilon(delta=1e-5)  # after training as usual
    """

    _criterion_keywords: ClassVar[frozenset[str]] = frozenset()  # for _prepare_criterion

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        super().__init__(create_accountant(mechanism=accountant))
        self.secure_mode = secure_mode
        self.secure_rng: torch.Generator | None = SystemGenerator() if secure_mode else None
        self.dataset: Dataset[Any] | None = None
        self._layouts: list[Single] = []  # of the optimizers that were made private

    # --- make private ---

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = nn.CrossEntropyLoss(),  # noqa: B008 (Opacus' signature; never modified)
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        data_layout: str = "auto",
        privacy_unit: str | None = None,
        expected_batch_size: float | None = None,
        sample_rate: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a training run private. Nothing is changed if an argument is refused.

        With a model sharded by FSDP2 all ranks must call this together; if one is refused, or
        if they disagree on an argument, all raise.

        Args:
            module: Model in training mode, of whose parameters some are trainable. Wrap it
                with DDP or FSDP2 before, if at all.
            optimizer: Optimizer over the model's parameters.
            criterion: Loss function; used in ghost modes, where it is wrapped.
            data_loader: Loader of the private data set.
            noise_multiplier: Standard deviation of the noise in units of ``max_grad_norm``.
            max_grad_norm: Clipping norm C of per-sample gradients.
            batch_first: Whether activations have the batch in dimension 0.
            loss_reduction: ``"mean"`` or ``"sum"``, how the criterion reduces over samples.
            poisson_sampling: Draw each sample independently, as the accountants assume.
            clipping: ``"flat"``, or another kind of ``get_optimizer_class``.
            noise_generator: Seeded source of the noise's key, for runs that can be repeated: who
                knows the seed knows the noise. Not with ``secure_mode``.
            grad_sample_mode: ``"hooks"``, ``"ghost"``, ``"ghost_fsdp"``, ...; ``"auto"`` chooses.
            wrap_model: Return a wrapper (``True``), or the hooks object.
            rand_on_empty: See :class:`~opacus.data_loader.DPDataLoader`.
            data_layout: With FSDP2, whether ranks hold different samples (``"sharded"``, for
                training) or the same ones (``"replicated"``, to compare with one process).
                ``"auto"``: sharded; an ordinary loader is dealt out to the ranks. The batches
                are checked against it.
            privacy_unit: Name of an argument of the model, or key of its batch, that says whose
                each row ``[rows]`` or token ``[rows, tokens]`` is, -1 for nobody's; a unit may have
                several rows, all on one rank. It is taken out before the model runs, except
                ``"position_ids"`` and ``"cu_seqlens"``, which say where the documents of a packed
                row start. What is clipped, and counted by the data loader, is then such a unit.
                ``None``: each row is a sample of its own.
            expected_batch_size: Samples that a batch of all ranks is expected to have, which the
                sum is divided by with ``loss_reduction="mean"``. A public number: by default it is
                derived from the size of the data set, which the update then depends on.
            sample_rate: Probability of one sample being in one batch, a public number too; an
                epoch has its inverse of steps. By default ``1 / len(data_loader)``.
            kwargs: Further arguments of the optimizer class and of the model's wrapper
                (``deferred_norm``, ``use_ghost_clipping``).

        Returns:
            ``(module, optimizer, data_loader)``, or ``(module, optimizer, criterion,
            data_loader)`` in ghost modes and ``"auto"``: the loss must come from that criterion.

        Raises:
            ValueError: An argument is out of range, or does not fit the others.
            UnsupportedModuleError: The model has layers that cannot be private.
        """
        with on_all_ranks(
            module,
            grad_sample_mode,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            data_layout=data_layout,
            deferred_norm=kwargs.get("deferred_norm"),
            expected_batch_size=expected_batch_size,
            sample_rate=sample_rate,
            further_arguments=sorted(kwargs),
        ) as agreed:
            choice = choose(grad_sample_mode, module, criterion, clipping)
            if choice is not None:
                grad_sample_mode = agreed["the mode that 'auto' stands for"] = choice.mode
            check_privacy_unit(privacy_unit, grad_sample_mode, wrap_model)
            check_noise_source(noise_generator, self.secure_mode)
            check_public_numbers(data_loader, expected_batch_size, sample_rate)
            mode = check_arguments(
                module=module,
                optimizer=optimizer,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                loss_reduction=loss_reduction,
                clipping=clipping,
                grad_sample_mode=grad_sample_mode,
            )
            check_parallelism(module, mode, kwargs.get("deferred_norm"))
            data_layout = choose_data_layout(
                data_layout,
                data_loader,
                mode=mode,
                secure_mode=self.secure_mode,
                counts_samples=bool(self._criterion_keywords),
            )
            warn_of_another_dataset(self.dataset, data_loader)
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        distributed = is_distributed(module)
        generator = self.secure_rng if self.secure_mode else noise_generator
        model_kwargs = {k: kwargs.pop(k) for k in _MODEL_KEYWORDS & kwargs.keys()}
        if mode.parallelism == "fsdp":
            model_kwargs["data_layout"] = data_layout
        loss_kwargs = {k: kwargs.pop(k) for k in self._criterion_keywords & kwargs.keys()}

        private_module = self._prepare_model(
            module,
            batch_first=batch_first,
            max_grad_norm=max_grad_norm,
            loss_reduction=loss_reduction,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            **model_kwargs,
        )
        if choice is not None:
            private_module.auto_choice = choice
        if privacy_unit is not None:
            private_module.privacy_unit = privacy_unit
        try:
            if poisson_sampling:
                private_module.forbid_grad_accumulation()
            private_loader = self._prepare_data_loader(
                data_loader,
                distributed=distributed and data_layout == "sharded",
                poisson_sampling=poisson_sampling,
                batch_first=batch_first,
                rand_on_empty=rand_on_empty,
                sample_rate=sample_rate,
            )
            if data_layout == "replicated":
                private_loader = repeat_data_loader(private_loader)
            elif mode.parallelism == "fsdp":
                follow_mesh(private_loader, private_module._ranks)
            rate = sample_rate_of(private_loader) if sample_rate is None else sample_rate
            expected = expected_batch_size_on_rank(
                private_loader, rate, distributed, expected_batch_size
            )
            private_optimizer = self._prepare_optimizer(
                optimizer=optimizer,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                expected_batch_size=expected,
                loss_reduction=loss_reduction,
                distributed=distributed,
                clipping=clipping,
                noise_generator=generator,
                grad_sample_mode=grad_sample_mode,
                **kwargs,
            )
        except BaseException:
            private_module.cleanup()
            raise
        private_module.hold_only(p for g in private_optimizer.param_groups for p in g["params"])
        private_optimizer.isolation = getattr(private_module, "isolation", None)
        self._prepare_noise(private_optimizer, module)
        private_optimizer.attach_step_hook(self.step_counter(rate))
        if poisson_sampling:
            private_optimizer.follow_draws(private_loader.batch_sampler.draws)
        if not mode.needs_criterion:
            loss = () if choice is None else (criterion,)  # "auto" always returns four
            return private_module, private_optimizer, *loss, private_loader
        # One home of C, sigma and reduction for clipping and noise.
        private_module._privacy = private_optimizer._privacy
        private_module.order_parameters(private_optimizer.params)
        private_criterion = self._prepare_criterion(
            module=private_module,
            optimizer=private_optimizer,
            criterion=criterion,
            loss_reduction=loss_reduction,
            **loss_kwargs,
        )
        return private_module, private_optimizer, private_criterion, private_loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = nn.CrossEntropyLoss(),  # noqa: B008 (Opacus' signature; never modified)
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        sample_rate: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Like :meth:`make_private`, with the noise that a privacy budget asks for.

        Args:
            target_epsilon: Epsilon after ``epochs`` epochs; not exceeded.
            target_delta: Delta of the guarantee.
            epochs: Number of epochs that will be trained. Others: see :meth:`make_private`.
        """
        if len(self.accountant) > 0:
            warnings.warn(
                "this PrivacyEngine has spent privacy already; target_epsilon is for the coming "
                "epochs alone, so the total will be larger",
                stacklevel=2,
            )
        warn_of_another_dataset(self.dataset, data_loader)
        check_public_numbers(data_loader, kwargs.get("expected_batch_size"), sample_rate)
        rate = sample_rate
        if rate is None:
            rate = matching_sample_rate(data_loader) if poisson_sampling else 1 / len(data_loader)
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=rate,
            epochs=epochs,
            accountant=self.accountant.mechanism(),
        )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            sample_rate=sample_rate,
            **kwargs,
        )

    # --- checks ---

    def is_compatible(
        self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: Any
    ) -> bool:
        """Whether :meth:`validate` finds nothing wrong."""
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: Any) -> None:
        """Check that a model can be private.

        Raises:
            UnsupportedModuleError: It names the layers and says what to replace them with.
        """
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of ``module`` whose unsupported layers are replaced.

        Raises:
            UnsupportedModuleError: A layer has no replacement.
        """
        fixed = ModuleValidator.fix(module)
        ModuleValidator.validate(fixed, strict=True)
        return fixed

    # --- steps of make_private ---

    def _prepare_model(
        self,
        module: nn.Module,
        *,
        batch_first: bool = True,
        max_grad_norm: float | list[float] = 1.0,
        loss_reduction: str = "mean",
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        **kwargs: Any,
    ) -> Any:
        self.validate(module=module, optimizer=None, data_loader=None)
        if grad_sample_mode == AUTO or mode_of(grad_sample_mode).needs_criterion:
            kwargs["max_grad_norm"] = max_grad_norm
        if isinstance(module, AbstractGradSampleHooks):
            return module
        return wrap(
            module,
            grad_sample_mode,
            wrap_model,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            **kwargs,
        )

    def _prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        *,
        poisson_sampling: bool,
        distributed: bool,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        sample_rate: float | None = None,
    ) -> DataLoader[Any]:
        if self.dataset is None:
            self.dataset = data_loader.dataset
        if poisson_sampling:
            return DPDataLoader.from_data_loader(
                data_loader,
                generator=self.secure_rng,
                distributed=distributed,
                batch_first=batch_first,
                rand_on_empty=rand_on_empty,
                sample_rate=sample_rate,
            )
        warn_of_uneven_sampling(data_loader)
        if distributed:
            data_loader = shard_data_loader(data_loader)
        if self.secure_mode:
            return switch_generator(data_loader=data_loader, generator=self.secure_rng)
        return data_loader

    def _prepare_optimizer(
        self,
        *,
        optimizer: Optimizer,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        expected_batch_size: int | float,
        loss_reduction: str = "mean",
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **kwargs: Any,
    ) -> DPOptimizer:
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        cls: Any = get_optimizer_class(clipping, distributed, grad_sample_mode)
        return cls(  # type: ignore[no-any-return]
            optimizer=optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=noise_generator,
            secure_mode=self.secure_mode,
            **kwargs,
        )

    def _prepare_noise(self, optimizer: DPOptimizer, module: nn.Module) -> None:
        """Name the parameters; no step that the accountant knows of has its noise again."""
        optimizer.name_parameters(module)
        self._layouts.append(optimizer._layout)
        self._skip_known_steps()
        if optimizer._layout.key.seeded:
            say_that_noise_is_seeded()

    def _skip_known_steps(self) -> None:
        """No optimizer of this engine gets the noise of a step that the accountant knows of."""
        for layout in self._layouts:
            layout.key.at_least({NOISE: len(self.accountant)})

    def _prepare_criterion(
        self,
        *,
        module: Any,
        optimizer: Any,
        criterion: Any,
        loss_reduction: str = "mean",
        **kwargs: Any,
    ) -> DPLossFastGradientClipping:
        return DPLossFastGradientClipping(
            module, optimizer, criterion, loss_reduction=loss_reduction, **kwargs
        )

    # --- checkpoints ---

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | BinaryIO,
        module: Any,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: _NoiseScheduler | None = None,
        grad_clip_scheduler: _GradClipScheduler | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Save model, accountant and, if given, schedulers, optimizer and the state of its noise.

        Under FSDP2 every rank must call this; the whole, unsharded state is written by
        rank 0 (to a file) or by every rank (to a buffer), so that it loads into any
        number of ranks. A file is replaced only when it has been written completely.

        Args:
            path: File, or writable binary buffer.
            module: The private module, or its hooks object.
            optimizer: The private optimizer.
            noise_scheduler, grad_clip_scheduler: Schedulers of sigma and of C.
            checkpoint_dict: Further entries, kept as they are.
            module_state_dict_kwargs, torch_save_kwargs: For ``state_dict``, ``torch.save``.
        """
        save_training_state(
            path,
            accountant=self.accountant,
            module=module,
            optimizer=optimizer,
            schedulers=_by_key(noise_scheduler, grad_clip_scheduler),
            extra=checkpoint_dict,
            state_dict_kwargs=module_state_dict_kwargs,
            save_kwargs=torch_save_kwargs,
        )

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | BinaryIO,
        module: Any,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: _NoiseScheduler | None = None,
        grad_clip_scheduler: _GradClipScheduler | None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` saved, also into another number of ranks.

        Args:
            path: File, or readable binary buffer.
            module: The private module, or its hooks object, or a plain model.
            optimizer: The private optimizer.
            noise_scheduler, grad_clip_scheduler: Schedulers of sigma and of C.
            module_load_dict_kwargs, torch_load_kwargs: For ``load_state_dict``, ``torch.load``.

        Returns:
            The whole checkpoint.

        Raises:
            ValueError: The checkpoint is of another model; nothing has been loaded then.
        """
        checkpoint = load_training_state(
            path,
            accountant=self.accountant,
            module=module,
            optimizer=optimizer,
            schedulers=_by_key(noise_scheduler, grad_clip_scheduler),
            state_dict_kwargs=module_load_dict_kwargs,
            load_kwargs=torch_load_kwargs,
        )
        self._skip_known_steps()
        return checkpoint


_MODEL_KEYWORDS = {"deferred_norm", "use_ghost_clipping", "strict", "force_functorch"}


def _by_key(noise: Any, clip: Any) -> dict[str, Any]:
    return {"noise_scheduler_state_dict": noise, "grad_clip_scheduler_state_dict": clip}
