"""What PrivacyEngine refuses, before anything has been changed."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import logging
import math
import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from opacus.core.platform.profiling import variables_set
from opacus.core.platform.sharded import is_fsdp
from opacus.core.privacy.clipping import FLAT_RULES
from opacus.core.privacy.gradients import refuse_hooks
from opacus.core.privacy.key import reproducible_from_environment
from opacus.core.privacy.params import PrivacyParams, as_number
from opacus.core.ranks.agreement import describe, together
from opacus.core.record.compiled import compiled_taps_from_environment
from opacus.core.record.lone import lone_sample_from_environment
from opacus.core.step.auto import ChosenMode, chosen_for
from opacus.core.step.modes import AUTO, MODES, mode_of
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as _OwnDDP
from opacus.engine_settings import OF_THE_MODEL, Settings
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    deferred_from_environment,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import check_sharded
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.optimizers.utils import check_norm_count, params

logger = logging.getLogger(__name__)


def check_privacy_unit(settings: Settings) -> None:
    """Check ``make_private``'s argument that names the units.

    Raises:
        ValueError: It is not a name, or nothing reads the model's arguments in this mode.
    """
    privacy_unit, grad_sample_mode = settings.privacy_unit, settings.grad_sample_mode
    if privacy_unit is None:
        return
    if not isinstance(privacy_unit, str) or not privacy_unit:
        raise ValueError(
            "privacy_unit must be the name of an argument of the model (or the key of its batch), "
            f"such as 'unit_ids', got {privacy_unit!r}"
        )
    if not settings.wrap_model:
        raise ValueError(
            "privacy_unit needs wrap_model=True: it is the wrapper that takes the units from the "
            "model's arguments"
        )
    if grad_sample_mode == "no_op":
        raise ValueError(
            "privacy_unit is not supported by grad_sample_mode='no_op', which does not record "
            "layers: use 'hooks' or a ghost mode"
        )


def check_public_numbers(
    data_loader: Any, expected_batch_size: float | None, sample_rate: float | None
) -> None:
    """Check the numbers that may be given instead of being derived from the data loader.

    Raises:
        TypeError: One is no number.
        ValueError: One is out of range, or there is no loader.
    """
    if data_loader is None:
        raise ValueError(
            "data_loader must be the loader of the private data set, got None. Without one, build "
            "the parts by hand: model = GradSampleModule(model), optimizer = DPOptimizer("
            "optimizer, noise_multiplier=..., max_grad_norm=..., expected_batch_size=...), then "
            "optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=...)); "
            "each batch must be drawn by Poisson sampling at that rate"
        )
    if not hasattr(data_loader, "dataset"):
        raise ValueError(
            f"data_loader is a {type(data_loader).__name__}: give a torch.utils.data.DataLoader "
            "over the private data set, such as DataLoader(dataset, batch_size=64)"
        )
    given = sample_rate is not None and expected_batch_size is not None
    streams = isinstance(data_loader.dataset, IterableDataset)
    if streams and not given:
        try:
            len(data_loader.dataset)
        except TypeError:
            raise ValueError(
                "the data set of data_loader is a stream (IterableDataset) without a length, of "
                "which a rate and a batch size cannot be derived: use a map-style data set, or "
                "pass sample_rate= and expected_batch_size= with poisson_sampling=False"
            ) from None
    if sample_rate is not None and not 0 < as_number("sample_rate", sample_rate) <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate!r}")
    size = expected_batch_size
    if size is not None and not 0 < as_number("expected_batch_size", size) < math.inf:
        raise ValueError(f"expected_batch_size must be a positive number of samples, got {size!r}")


def check_arguments(settings: Settings) -> None:
    """Check the arguments of ``make_private`` that need no loader.

    Raises:
        ValueError: It names the argument and says what to do.
    """
    module, optimizer = settings.module, settings.optimizer
    clipping, max_grad_norm = settings.clipping, settings.max_grad_norm
    if mode_of(settings.grad_sample_mode).needs_criterion and not callable(settings.criterion):
        raise ValueError(
            f"grad_sample_mode={settings.grad_sample_mode!r} needs the criterion, from which the "
            f"loss must come: pass criterion=nn.CrossEntropyLoss(), say; got {settings.criterion!r}"
        )
    get_optimizer_class(clipping, distributed=False, grad_sample_mode=settings.grad_sample_mode)
    PrivacyParams(
        noise_multiplier=settings.noise_multiplier,
        max_grad_norm=max_grad_norm,
        loss_reduction=settings.loss_reduction,
    )
    if clipping in ("normalised", "psac") and max_grad_norm == math.inf:
        raise ValueError(f"clipping={clipping!r} needs a finite max_grad_norm, got inf")
    if isinstance(max_grad_norm, (list, tuple)) != (clipping == "per_layer"):
        raise ValueError(
            "max_grad_norm must be one number, or a list with one number for each trainable "
            f"parameter if clipping='per_layer'; got {max_grad_norm!r} with clipping={clipping!r}"
        )
    _check_optimizer(optimizer)
    if isinstance(module, AbstractGradSampleModule):
        raise ValueError(
            "the module is wrapped already: pass module.to_standard_module(), which takes the "
            "hooks off"
        )
    _check_parameters(module, optimizer)
    if clipping == "per_layer":
        check_norm_count(max_grad_norm, len(params(optimizer)))


def check_scales(settings: Settings, adaptive: bool) -> None:
    """Check that gradients can be scaled before they are clipped, if the optimizer asks for it.

    Raises:
        ValueError: They cannot be.
    """
    optimizer = settings.optimizer
    if any(hasattr(part, "gradient_scales") for part in getattr(optimizer, "optimizers", ())):
        raise ValueError(
            "an optimizer that scales gradients before they are clipped (ScaledAdamW) must hold "
            "all parameters: scales are relative to each other"
        )
    if hasattr(optimizer, "gradient_scales") and (adaptive or settings.clipping not in FLAT_RULES):
        raise ValueError(
            f"{type(optimizer).__name__} scales gradients before they are clipped, which needs one "
            f"clipping norm that stays: clipping must be one of {sorted(FLAT_RULES)}, got "
            f"{settings.clipping!r}{' by an adaptive engine' if adaptive else ''}"
        )


def check_further(settings: Settings, of_the_criterion: Set[str]) -> None:
    """Check the further arguments, which go to the model's wrapper, criterion and optimizer.

    Args:
        settings: All arguments.
        of_the_criterion: Names of those that the criterion takes.

    Raises:
        TypeError: Nothing takes one of them, or what adaptive clipping needs is missing.
    """
    given, clipping = settings.further.keys(), settings.clipping
    taken = _arguments_of(
        get_optimizer_class(clipping, is_distributed(settings.module), settings.grad_sample_mode)
    )
    known = OF_THE_MODEL | of_the_criterion | taken
    if unknown := sorted(given - known):
        names = [*known, *(field.name for field in dataclasses.fields(settings))]
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f": did you mean {near[0]!r} instead of {unknown[0]!r}?" if near else ""
        raise TypeError(f"make_private got unexpected arguments {unknown}{hint}")
    if clipping == "adaptive" and "unclipped_num_std" not in given:
        raise TypeError(
            "clipping='adaptive' needs unclipped_num_std, the deviation of the noise on the number "
            "of samples below C, above noise_multiplier / 2: a twentieth of the expected batch is "
            "usual (arXiv:1905.03871)"
        )


def _arguments_of(cls: type[DPOptimizer]) -> Set[str]:
    """Keywords that an optimizer takes beside those of :class:`DPOptimizer`."""
    own = [base for base in cls.__mro__ if issubclass(base, DPOptimizer)]
    taken = set[str]().union(*(inspect.signature(base).parameters for base in own))
    return (taken - inspect.signature(DPOptimizer).parameters.keys()) | cls._ignored_keywords


def _check_optimizer(optimizer: Optimizer) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer, or a list "
            "of them in which each trained parameter is in one"
        )
    for part in getattr(optimizer, "optimizers", (optimizer,)):
        if isinstance(part, DPOptimizer):
            raise ValueError(
                "the optimizer is private already: pass the plain one, optimizer.original_optimizer"
            )
        if isinstance(part, torch.optim.LBFGS):
            raise ValueError(
                "optimizer is LBFGS, which evaluates the loss several times in a step and compares "
                "the values: each evaluation would be a release of its own, and line searches on "
                "noise fail. Use a first-order optimizer, such as SGD or AdamW"
            )
        if getattr(getattr(part, "gradient_state", None), "num_steps", 1) > 1:
            raise ValueError(
                "accelerate's optimizer leaves out steps, as gradient_accumulation_steps "
                "is above 1: they would be counted, and their updates lost. Call make_private "
                "before accelerator.prepare(), with an Accelerator that accumulates nothing; "
                "BatchMemoryManager splits batches"
            )


def _check_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    lazy = [n for n, p in module.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(
            f"parameters {lazy[:5]} of a lazy layer have no shape yet: run the module once on a "
            "batch, then build the optimizer, then call make_private"
        )
    refuse_hooks(module.named_parameters())
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("module has no trainable parameters: nothing would be trained")
    complex_ = [n for n, p in module.named_parameters() if p.requires_grad and p.is_complex()]
    if complex_:
        raise ValueError(
            f"parameters {complex_[:5]} are complex, for which no norms or noise are defined here: "
            "hold their real and imaginary parts in a real parameter [..., 2] and use "
            "torch.view_as_complex(parameter) in forward, or freeze them"
        )
    known = {id(p) for p in module.parameters()}
    groups = optimizer.param_groups
    foreign = [tuple(p.shape) for g in groups for p in g["params"] if id(p) not in known]
    if foreign:
        raise ValueError(
            "Module parameters are different than optimizer Parameters: the optimizer holds "
            f"{len(foreign)} parameters that are not the module's (shapes {foreign[:5]}). Build "
            "the optimizer from module.parameters(), after the module has been fixed, moved and "
            "sharded"
        )


def choose(settings: Settings) -> ChosenMode | None:
    """The mode that ``"auto"`` stands for; ``None`` if another mode was asked for.

    Raises:
        ValueError: There is no criterion, or no mode that does this.
    """
    if settings.grad_sample_mode != AUTO:
        return None
    if settings.criterion is None:
        raise ValueError(
            "grad_sample_mode='auto' needs the criterion, from which the loss must come: pass "
            "criterion=, or use grad_sample_mode='hooks', which works with any loss"
        )
    return chosen_for(settings.module, settings.clipping)


def check_module(module: object) -> None:
    """Check the argument that all other checks look into.

    Raises:
        ValueError: It is no module.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got a {type(module).__name__}")


@contextmanager
def on_all_ranks(
    module: nn.Module, grad_sample_mode: str, **facts: Any
) -> Iterator[dict[str, Any]]:
    """Run local checks; with a model on several ranks all raise if one does, or if they disagree.

    See :func:`~opacus.core.ranks.agreement.together`.

    Args:
        module: Must have the same parameters, values apart, on all ranks.
        grad_sample_mode: Must be the same on all ranks.
        facts: What else must.

    Yields:
        The facts, to which the body may add what it has found out.
    """
    mode = MODES.get(grad_sample_mode) if isinstance(grad_sample_mode, str) else None
    spread = is_distributed(module) or (mode is not None and mode.parallelism != "any")
    spread = spread or (grad_sample_mode == AUTO and any(is_fsdp(m) for m in module.modules()))
    ask = spread and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if ask:
        about = {"the model": describe(module), "grad_sample_mode": grad_sample_mode}
        facts = {**about, **facts}
    with together(ask, facts):
        yield facts


def is_distributed(module: nn.Module) -> bool:
    """Whether ranks hold different samples: DDP or FSDP2."""
    return is_fsdp(module) or isinstance(module, _OwnDDP | DistributedDataParallel)


def check_parallelism(settings: Settings) -> None:
    """Check that the mode is one for a model that is sharded as this one is.

    Raises:
        ValueError: FSDP2 and the mode do not fit, or an environment variable is wrong.
    """
    module, mode = settings.module, settings.mode
    if mode.parallelism == "fsdp":
        check_sharded(module, book_keeping=mode.strategy == "one_pass")
    elif mode.samples != "user" and any(is_fsdp(m) for m in module.modules()):
        modes = [name for name, known in MODES.items() if known.parallelism == "fsdp"]
        raise ValueError(
            f"the module is sharded by FSDP2, which grad_sample_mode must be made for: use one "
            f"of {modes}"
        )
    if mode.parallelism == "tp" and isinstance(module, DistributedDataParallel | _OwnDDP):
        raise ValueError(
            "ghost_tp sums no gradients over replicas, so DistributedDataParallel's would drift "
            "apart: use grad_sample_mode='ghost' with it"
        )
    if mode.needs_criterion and settings.deferred_norm is None:
        deferred_from_environment()
    lone_sample_from_environment()
    compiled_taps_from_environment()
    reproducible_from_environment()
    variables_set()


def check_noise_source(settings: Settings, secure_mode: bool) -> None:
    """Refuse predictable noise in secure mode.

    Raises:
        ValueError: A generator in secure mode, or a grid that is not a power of two.
    """
    generator = settings.noise_generator
    if not isinstance(generator, torch.Generator | None):
        raise ValueError(
            "noise_generator must be a torch.Generator, such as torch.Generator().manual_seed(0), "
            f"got {generator!r}"
        )
    if generator is not None and secure_mode:
        raise ValueError(
            "noise_generator makes noise predictable, which secure mode rules out; leave it out"
        )
    grid = settings.release_grid
    if grid is None:
        return
    if not 0 < as_number("release_grid", grid) <= 1 or math.frexp(grid)[0] != 0.5:
        raise ValueError(
            "release_grid must be a power of two, at most 1: sums are rounded to that part of the "
            f"noise's power of two; got {grid!r}"
        )


@functools.cache  # once a process
def say_that_noise_is_seeded() -> None:
    """Tell what a seed means for the guarantee."""
    logger.warning(
        "The noise comes from a seed (noise_generator, or OPACUS_REPRODUCIBLE=1): who knows the "
        "seed can compute the noise and remove it. Keep the seed secret, or release only what was "
        "trained without one."
    )


def warn_of_another_dataset(known: Dataset[Any] | None, data_loader: DataLoader[Any]) -> None:
    """Epsilon is counted for one data set: warn if an engine that has one gets another."""
    if known is not None and known is not data_loader.dataset:
        warnings.warn(
            f"this PrivacyEngine has accounted for another dataset object ({known}) and now gets "
            f"{data_loader.dataset}. Epsilon is counted for one dataset: use an engine for each, "
            "unless both objects hold the same samples",
            stacklevel=4,
        )
