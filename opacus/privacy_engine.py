"""The main entry point: makes a model, an optimizer and a data loader private."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from opacus.accountants import create_accountant
from opacus.accountants.sampling import Sampling
from opacus.core.privacy.correlated import CorrelatedNoise
from opacus.core.privacy.params import check_switches, plain_norms
from opacus.core.ranks.parallelism import Single
from opacus.data.rates import sample_rate_of
from opacus.engine_budget import noise_for_budget
from opacus.engine_settings import Settings
from opacus.engine_steps import EngineSteps
from opacus.utils.uniform_sampler import SystemGenerator
from opacus.validators.module_validator import ModuleValidator


class PrivacyEngine(EngineSteps):
    """Adds differential privacy to PyTorch training and counts what it costs.

    Args:
        accountant: How privacy loss is counted: ``"prv"``, ``"pld"``, ``"rdp"`` or ``"gdp"``.
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

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        check_switches(secure_mode=secure_mode)
        super().__init__(create_accountant(mechanism=accountant))
        self.secure_mode = secure_mode
        self.secure_rng: torch.Generator | None = SystemGenerator() if secure_mode else None
        self.dataset: Dataset[Any] | None = None
        self._parallelisms: list[Single] = []  # of the optimizers that were made private

    # --- make private ---

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
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
        correlated_noise: CorrelatedNoise | None = None,
        sampling: Sampling | None = None,
        max_batch_size: int | None = None,
        release_grid: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a training run private. Nothing is changed if an argument is refused.

        With a model sharded by FSDP2 all ranks must call this together; if one is refused, or
        if they disagree on an argument, all raise.

        Args:
            module: Model in training mode, of whose parameters some are trainable. Wrap it
                with DDP or FSDP2 before, if at all.
            optimizer: Optimizer over the model's parameters, or a list of optimizers in which each
                trainable parameter is in one (Muon for matrices, AdamW for the rest); what is
                returned is one private :class:`~opacus.optimizers.JointOptimizer`.
            criterion: Loss function; used in ghost modes, where it is wrapped.
            data_loader: Loader of the private data set.
            noise_multiplier: Standard deviation of the noise in units of ``max_grad_norm``.
            max_grad_norm: Clipping norm C of per-sample gradients; with ``clipping="per_layer"``
                one for each trainable parameter, in a list, array or tensor.
            batch_first: Whether activations have the batch in dimension 0.
            loss_reduction: ``"mean"`` or ``"sum"``, how the criterion reduces over samples.
            poisson_sampling: Draw each sample independently, as the accountants assume.
            clipping: ``"flat"``, ``"normalised"`` (AUTO-S), ``"psac"``, ``"per_layer"`` or
                ``"adaptive"``, which needs ``unclipped_num_std``; see
                :class:`~opacus.optimizers.AdaClipDPOptimizer`.
            noise_generator: Seeded source of the noise's key, for runs that can be repeated: who
                knows the seed knows the noise. Not with ``secure_mode``.
            grad_sample_mode: How per-sample gradients are clipped: ``"hooks"`` holds them,
                ``"ghost"`` and ``"ghost_bk"`` do not, ``"ghost_fsdp_bk"`` is for FSDP2, ...;
                ``"auto"`` chooses. ``docs/modes.md`` has all.
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
            correlated_noise: Noise of which later steps take back a part, in place of independent
                noise. Batches are the same in each pass over the data then, and the accountant
                counts the whole run at its first step, without amplification by sampling; with
                ``CorrelatedNoise.banded`` batches are drawn from groups of the data in turn, and
                one step of each round of the groups counts, at so many times the rate.
            sampling: How a unit relates to the rows that are drawn, where it is not one row:
                ``UserRows`` or ``GaussianMixture``. Needs an engine with the accountant "pld".
            max_batch_size: All batches have rows for so many items, on all ranks together. Smaller
                ones are filled up by rows of nobody, named -1 by ``unit_ids``, which the batch
                then has and ``privacy_unit`` must name; of larger ones items are left out, which
                the accountant "pld" counts.
            release_grid: A power of two: sums with noise are rounded to multiples of this part of
                the noise's power of two, against attacks on the lowest bits of floating-point
                numbers (arXiv 2112.05307). ``2 ** -12`` adds 5e-9 to the noise's variance.
                ``secure_mode`` alone rounds to ``2 ** -16``.
            kwargs: Further arguments of the optimizer class and of the model's wrapper
                (``deferred_norm``, ``use_ghost_clipping``).

        Returns:
            ``(module, optimizer, data_loader)``, or ``(module, optimizer, criterion,
            data_loader)`` in ghost modes and ``"auto"``: the loss must come from that criterion.

        Raises:
            TypeError: An unknown keyword, or a number that is none.
            ValueError: An argument is out of range, or does not fit the others.
            UnsupportedModuleError: The model has layers that cannot be private.
        """
        settings = self._checked(
            Settings(
                module=module,
                optimizer=optimizer,  # type: ignore[arg-type]  # joined when checked
                criterion=criterion,
                data_loader=data_loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=plain_norms(max_grad_norm),
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling,
                clipping=clipping,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
                rand_on_empty=rand_on_empty,
                data_layout=data_layout,
                privacy_unit=privacy_unit,
                expected_batch_size=expected_batch_size,
                sample_rate=sample_rate,
                correlated_noise=correlated_noise,
                sampling=sampling,
                max_batch_size=max_batch_size,
                release_grid=release_grid,
                further=kwargs,
            )
        )
        model = self._private_model(settings)
        try:
            loader = self._private_loader(settings, model)
            rate = sample_rate_of(loader) if sample_rate is None else sample_rate
            private = self._private_optimizer(settings, loader, rate)
        except BaseException:
            model.cleanup()
            raise
        self._connect(settings, model, private, loader, rate)
        if settings.mode.needs_criterion:
            return model, private, self._private_criterion(settings, model, private), loader
        loss = () if settings.choice is None else (criterion,)  # "auto" always returns four
        return model, private, *loss, loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
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
            target_epsilon: Epsilon after ``epochs`` epochs; not exceeded. What the engine has
                spent before is not in it; a warning says so.
            target_delta: Delta of the guarantee, in (0, 1), usually below 1 / size of the data set.
            epochs: Number of epochs that will be trained; each further one spends more.
            kwargs: Also ``epsilon_tolerance``, and what the accountant's ``get_epsilon`` takes
                (``alphas`` of "rdp", ``eps_error`` of "prv"), for the search. Others: see
                :meth:`make_private`.

        Returns:
            See :meth:`make_private`; ``optimizer.noise_multiplier`` is the noise that was found.

        Raises:
            ValueError: No noise meets the budget, or see :meth:`make_private`.
        """
        noise_multiplier = noise_for_budget(
            self.accountant,
            self.dataset,
            module,
            data_loader,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            epochs=epochs,
            poisson_sampling=poisson_sampling,
            sample_rate=sample_rate,
            further=kwargs,
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
        """Whether :meth:`validate` finds nothing wrong with ``module``, the only one looked at."""
        return ModuleValidator.is_valid(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of ``module`` whose unsupported layers are replaced.

        Raises:
            UnsupportedModuleError: A layer has no replacement.
        """
        fixed = ModuleValidator.fix(module)
        ModuleValidator.validate(fixed, strict=True)
        return fixed
