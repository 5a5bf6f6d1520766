"""How a privacy engine makes each part of a training run private."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from opacus.core.privacy.clipping import FLAT_RULES
from opacus.core.step.modes import AUTO, mode_of
from opacus.data.host_loader import switch_generator
from opacus.data.rates import expected_batch_size_on_rank, warn_of_uneven_sampling
from opacus.data.sharding import (
    choose_data_layout,
    follow_mesh,
    repeat_data_loader,
    shard_data_loader,
)
from opacus.data_loader import DPDataLoader
from opacus.engine_checkpoints import EngineCheckpoints
from opacus.engine_checks import (
    check_arguments,
    check_further,
    check_module,
    check_noise_source,
    check_parallelism,
    check_privacy_unit,
    check_public_numbers,
    check_scales,
    choose,
    is_distributed,
    on_all_ranks,
    say_that_noise_is_seeded,
    warn_of_another_dataset,
)
from opacus.engine_sampling import (
    check_correlated_noise,
    check_correlation,
    check_sampling,
    check_truncated,
    facts_of_draws,
    sampling_of,
)
from opacus.engine_settings import Settings
from opacus.grad_sample import AbstractGradSampleHooks
from opacus.grad_sample import wrap_model as wrap
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.optimizers.joint import joined
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators.module_validator import ModuleValidator


class EngineSteps(EngineCheckpoints):
    """Checks the settings of a run, and makes model, loader, optimizer and criterion private.

    Attributes:
        secure_mode: Whether sampling and noise come from ChaCha20.
        secure_rng: Their source then.
        dataset: The data set that the accountant counts for.
    """

    secure_mode: bool
    secure_rng: torch.Generator | None
    dataset: Dataset[Any] | None

    def validate(self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: Any) -> None:
        """Check that a model can be private; ``optimizer`` and ``data_loader`` are not looked at.

        Raises:
            UnsupportedModuleError: It names the layers and says what to replace them with.
        """
        ModuleValidator.validate(module, strict=True)

    def _checked(self, asked: Settings) -> Settings:
        """What was asked for, ``"auto"`` and the data layout resolved. Changes nothing.

        Raises:
            ValueError: An argument is refused; with a model on several ranks on all of them.
        """
        check_module(asked.module)
        with on_all_ranks(asked.module, asked.grad_sample_mode, **asked.facts()) as agreed:
            asked.check_switches()
            choice = choose(asked)
            if choice is not None:
                asked = replace(asked, grad_sample_mode=choice.mode, choice=choice)
                agreed["the mode that 'auto' stands for"] = choice.mode
            asked = replace(asked, optimizer=joined(asked.optimizer, asked.module))
            check_privacy_unit(asked)
            check_noise_source(asked, self.secure_mode)
            check_public_numbers(asked.data_loader, asked.expected_batch_size, asked.sample_rate)
            check_arguments(asked)
            check_sampling(asked, self.accountant)
            agreed |= facts_of_draws(asked)
            check_correlation(asked, adaptive=bool(self._criterion_keywords))
            check_scales(asked, adaptive=bool(self._criterion_keywords))
            if type(self)._prepare_optimizer is EngineSteps._prepare_optimizer:
                check_further(asked, self._criterion_keywords)
            check_parallelism(asked)
            data_layout = choose_data_layout(
                asked.data_layout,
                asked.data_loader,
                mode=asked.mode,
                secure_mode=self.secure_mode,
                counts_samples=bool(self._criterion_keywords),
            )
            warn_of_another_dataset(self.dataset, asked.data_loader)
            self.validate(
                module=asked.module, optimizer=asked.optimizer, data_loader=asked.data_loader
            )
        return replace(asked, data_layout=data_layout)

    def _private_model(self, settings: Settings) -> Any:
        model = self._prepare_model(
            settings.module,
            batch_first=settings.batch_first,
            max_grad_norm=settings.max_grad_norm,
            loss_reduction=settings.loss_reduction,
            grad_sample_mode=settings.grad_sample_mode,
            wrap_model=settings.wrap_model,
            **settings.of_the_model(),
        )
        if settings.choice is not None:
            model.auto_choice = settings.choice
        if settings.privacy_unit is not None:
            spread = is_distributed(settings.module)
            apart = spread and settings.data_layout != "replicated"
            ranks = dist.is_initialized() and (spread or settings.mode.parallelism == "tp")
            model.name_units_by(settings.privacy_unit, ranks=ranks, ranks_differ=apart)
        return model

    def _private_loader(self, settings: Settings, model: Any) -> DataLoader[Any]:
        if settings.poisson_sampling:
            model.forbid_grad_accumulation()
        how: dict[str, Any] = {}
        if settings.correlated_noise is not None:
            groups = settings.correlated_noise.groups
            how = {"cyclic": True} if groups is None else {"groups": groups}
        if settings.max_batch_size is not None:
            how["max_batch_size"] = settings.max_batch_size
        loader = self._prepare_data_loader(
            settings.data_loader,
            distributed=is_distributed(settings.module) and settings.data_layout == "sharded",
            poisson_sampling=settings.poisson_sampling,
            batch_first=settings.batch_first,
            rand_on_empty=settings.rand_on_empty,
            sample_rate=settings.sample_rate,
            **how,
        )
        check_correlated_noise(settings.correlated_noise, loader)
        split = settings.mode.parallelism == "tp" and dist.is_initialized()
        if split or settings.data_layout == "replicated":
            return repeat_data_loader(loader)
        if settings.mode.parallelism == "fsdp":
            follow_mesh(loader, model._ranks)
        check_truncated(settings.max_batch_size, loader)
        return loader

    def _private_optimizer(
        self, settings: Settings, loader: DataLoader[Any], rate: float
    ) -> DPOptimizer:
        distributed = is_distributed(settings.module)
        private = self._prepare_optimizer(
            optimizer=settings.optimizer,
            noise_multiplier=settings.noise_multiplier,
            max_grad_norm=settings.max_grad_norm,
            expected_batch_size=expected_batch_size_on_rank(
                loader, rate, distributed, settings.expected_batch_size
            ),
            loss_reduction=settings.loss_reduction,
            distributed=distributed,
            clipping=settings.clipping,
            noise_generator=self.secure_rng if self.secure_mode else settings.noise_generator,
            grad_sample_mode=settings.grad_sample_mode,
            **settings.of_the_optimizer(self._criterion_keywords),
        )
        if settings.clipping in FLAT_RULES:
            private._privacy.clip_rule = settings.clipping
        return private

    def _connect(
        self, settings: Settings, model: Any, optimizer: Any, loader: Any, rate: float
    ) -> None:
        """Let model, optimizer, loader and accountant know of each other."""
        model.hold_only(p for group in optimizer.param_groups for p in group["params"])
        optimizer.isolation = model.isolation
        if model.isolation is not None:
            model.isolation.optimizer = optimizer
        self._prepare_noise(optimizer, settings.module)
        optimizer._parallelism.grid = settings.release_grid
        if settings.correlated_noise is not None:
            split = getattr(loader.batch_sampler, "groups", None) or loader.batch_sampler
            optimizer._parallelism.correlate(settings.correlated_noise, split)
        sampling = sampling_of(settings, loader)
        optimizer.plan = settings.plan(rate, sampling, self.accountant.mechanism())
        optimizer.attach_step_hook(self.step_counter(rate, sampling))
        optimizer.sampler = loader.batch_sampler if settings.poisson_sampling else None
        draws = None
        if optimizer.sampler is not None:
            draws = optimizer.sampler.draws
            optimizer.sampler.follow(optimizer.steps_of_others)
        optimizer.follow(draws, model._unit_names)

    def _private_criterion(self, settings: Settings, model: Any, optimizer: Any) -> Any:
        # One home of C, sigma and reduction for clipping and noise.
        model._privacy = optimizer._privacy
        groups = optimizer.param_groups
        model.order_parameters([p for group in groups for p in group["params"]])
        return self._prepare_criterion(
            module=model,
            optimizer=optimizer,
            criterion=settings.criterion,
            loss_reduction=settings.loss_reduction,
            **settings.of_the_criterion(self._criterion_keywords),
        )

    # --- what subclasses may replace ---

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
        cyclic: bool = False,
        groups: int | None = None,
        max_batch_size: int | None = None,
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
                cyclic=cyclic,
                groups=groups,
                max_batch_size=max_batch_size,
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
        """Name the parameters for the noise; no counted step's noise is drawn again."""
        optimizer.name_parameters(module)
        self._parallelisms.append(optimizer._parallelism)
        self._skip_known_steps()
        if optimizer._parallelism.key.seeded:
            say_that_noise_is_seeded()

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
