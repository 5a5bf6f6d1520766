"""Checkpoints of a private training run: model, optimizer, accountant, steps of the noise.

Under FSDP2 the whole, unsharded state is written once, so that a checkpoint loads into
any number of ranks, and into a plain model.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.checkpoints.names import inner_of, named_as_here, unwrapped
from opacus.checkpoints.noise_state import (
    ENTRY,
    check_noise,
    noise_entries,
    restore_noise,
    say_what_is_not_counted,
)
from opacus.core.platform.sharded import is_fsdp
from opacus.core.privacy.noise import without_inner_wrappers
from opacus.optimizers.joint import forget_state
from opacus.optimizers.optimizer import DPOptimizer

_MODULE = "module_state_dict"
_OPTIMIZER = "optimizer_state_dict"
_ACCOUNTANT = "privacy_accountant_state_dict"
_MECHANISM = "privacy_parameters"
_PLAN = "plan"


def save_training_state(
    path: Any,
    *,
    accountant: Any,
    module: Any,
    optimizer: DPOptimizer | None,
    schedulers: Mapping[str, Any],
    extra: dict[str, Any] | None = None,
    state_dict_kwargs: dict[str, Any] | None = None,
    save_kwargs: dict[str, Any] | None = None,
) -> None:
    """See :meth:`opacus.PrivacyEngine.save_checkpoint`; a collective call under FSDP2."""
    checkpoint = dict(extra or {})
    own_keys = {_MODULE, _OPTIMIZER, _ACCOUNTANT, _MECHANISM, ENTRY, *schedulers}
    taken = own_keys & checkpoint.keys()
    if taken:
        raise ValueError(f"checkpoint_dict must not have the keys {sorted(taken)}")
    inner = inner_of(module)
    checkpoint[_MODULE] = _model_state(module, inner, state_dict_kwargs or {})
    checkpoint[_ACCOUNTANT] = accountant.state_dict()
    if optimizer is not None:
        checkpoint[_OPTIMIZER] = optimizer_state(inner, optimizer)
        checkpoint[_MECHANISM] = privacy_parameters(optimizer)
        checkpoint |= noise_entries(optimizer)
    for key, scheduler in schedulers.items():
        if scheduler is not None:
            checkpoint[key] = scheduler.state_dict()
    _write(path, checkpoint, save_kwargs or {}, one_writer=is_fsdp(inner))


def load_training_state(
    path: Any,
    *,
    accountant: Any,
    module: Any,
    optimizer: DPOptimizer | None,
    schedulers: Mapping[str, Any],
    adaptive: bool = False,
    state_dict_kwargs: dict[str, Any] | None = None,
    load_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """See :meth:`opacus.PrivacyEngine.load_checkpoint`; ``adaptive``: training itself moves C."""
    if optimizer is not None and not isinstance(optimizer, DPOptimizer):
        raise ValueError(
            "optimizer must be the one that make_private returned, got "
            f"{type(optimizer).__name__}: leave it out to load the model alone"
        )
    checkpoint = _read(path, {"map_location": "cpu", **(load_kwargs or {})})
    inner = inner_of(module)
    _check(checkpoint, path, inner, strict=(state_dict_kwargs or {}).get("strict", True))
    if optimizer is not None:
        _check_optimizer(checkpoint.get(_OPTIMIZER, {}), path, optimizer)
        book = type(accountant)()
        book.load_state_dict(checkpoint[_ACCOUNTANT])  # its own checks
        check_noise(optimizer, checkpoint, steps=len(book))
        check_plan(optimizer, checkpoint.get(_MECHANISM, {}))
    _load_model(inner, named_as_here(checkpoint[_MODULE], inner), state_dict_kwargs or {})
    state = checkpoint.get(_OPTIMIZER, {})
    if optimizer is not None and state:
        load_optimizer(inner, optimizer, state)
    # Last: an error before leaves what was spent.
    taken = len(accountant)
    accountant.load_state_dict(checkpoint[_ACCOUNTANT])
    if optimizer is not None:
        optimizer.reset_accumulation()  # its samples would count twice in the batch that begins
        restore_noise(optimizer, checkpoint, steps=len(accountant), taken=taken)
        if _OPTIMIZER not in checkpoint and len(accountant):
            _warn_of_part("optimizer", saved=False)
    else:
        say_what_is_not_counted(taken, len(accountant))
    for key, scheduler in schedulers.items():
        if (scheduler is not None) != (key in checkpoint):
            _warn_of_part(key.removesuffix("_state_dict"), saved=scheduler is None)
        elif scheduler is not None:
            scheduler.load_state_dict(checkpoint[key])
    if optimizer is not None:
        if adaptive and "max_grad_norm" in checkpoint.get(_MECHANISM, {}):
            optimizer.max_grad_norm = checkpoint[_MECHANISM]["max_grad_norm"]
        warn_of_changes(optimizer, checkpoint.get(_MECHANISM, {}))
    return checkpoint


def _warn_of_part(name: str, *, saved: bool) -> None:
    what = (
        f"the checkpoint holds a {name}, which load_checkpoint was not given: it is not restored"
        if saved
        else f"the checkpoint holds no {name}, which load_checkpoint was given: it starts anew"
    )
    warnings.warn(what, stacklevel=4)


# --- model ---


def _model_state(module: Any, inner: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed.checkpoint.state_dict as dcp  # slow to import

    if is_fsdp(inner):
        options = dcp.StateDictOptions(full_state_dict=True)
        state = dcp.get_model_state_dict(inner, options=options)  # type: ignore[arg-type]
        return {name: to_cpu(value) for name, value in state.items()}
    owner = module if isinstance(module, nn.Module) else inner
    return owner.state_dict(**kwargs)


def _load_model(inner: nn.Module, state: dict[str, Any], kwargs: dict[str, Any]) -> None:
    import torch.distributed.checkpoint.state_dict as dcp  # slow to import

    if is_fsdp(inner):
        strict = kwargs.get("strict", True)
        options = dcp.StateDictOptions(full_state_dict=True, strict=strict)
        state = {without_inner_wrappers(name): value for name, value in state.items()}
        dcp.set_model_state_dict(inner, state, options=options)  # type: ignore[arg-type]
    else:
        inner.load_state_dict(state, **kwargs)


def _check(checkpoint: Any, path: Any, inner: nn.Module, *, strict: bool) -> None:
    missing = {_MODULE, _ACCOUNTANT} - (
        checkpoint.keys() if isinstance(checkpoint, dict) else set()
    )
    if missing:
        raise ValueError(
            f"{_name(path)} is not a checkpoint of a PrivacyEngine: no {sorted(missing)}"
        )
    states = named_as_here(checkpoint[_MODULE], inner), inner.state_dict()
    saved, own = [
        {n: tuple(v.shape) for n, v in state.items() if isinstance(v, Tensor)} for state in states
    ]
    shared = saved.keys() & own.keys()
    wrong = [f"{n} {saved[n]} (here {own[n]})" for n in sorted(shared) if saved[n] != own[n]]
    if strict:
        wrong += [f"{n} (not in this model)" for n in sorted(saved.keys() - own.keys())]
        wrong += [f"{n} (not in the checkpoint)" for n in sorted(own.keys() - saved.keys())]
    if wrong:
        raise ValueError(
            f"{_name(path)} is a checkpoint of another model; {len(wrong)} entries differ: "
            f"{', '.join(wrong[:5])}. Nothing was loaded"
        )


# --- optimizer ---


def _check_optimizer(state: Mapping[str, Any], path: Any, optimizer: DPOptimizer) -> None:
    """Refuse the state of another optimizer, which would fail in its next step.

    One of another version of torch may lack options or have more, but not both.
    """
    groups = state.get("param_groups", optimizer.param_groups)
    sizes, here = ([len(g["params"]) for g in every] for every in (groups, optimizer.param_groups))
    if sizes != here:
        raise ValueError(
            f"{_name(path)} is a checkpoint of another optimizer, with groups of {sizes} "
            f"parameters (here {here}). Nothing was loaded"
        )
    for own, saved in zip(optimizer.param_groups, groups, strict=True):
        ours, theirs = ({*group} - {"params", "initial_lr"} for group in (own, saved))
        if ours - theirs and theirs - ours:
            raise ValueError(
                f"{_name(path)} is a checkpoint of another optimizer, with the options "
                f"{sorted(theirs - ours)} and without {sorted(ours - theirs)} of "
                f"{type(optimizer.original_optimizer).__name__}. Nothing was loaded"
            )


def optimizer_state(inner: nn.Module, optimizer: DPOptimizer) -> dict[str, Any]:
    """The whole state of the optimizer; under FSDP2 a collective call, and a copy on the CPU."""
    import torch.distributed.checkpoint.state_dict as dcp  # slow to import

    if not is_fsdp(inner):
        return optimizer.state_dict()
    options = dcp.StateDictOptions(full_state_dict=True)
    plain: Any = inner  # is_fsdp has told mypy that it is no Module
    state = dcp.get_optimizer_state_dict(plain, optimizer.original_optimizer, options=options)
    return to_cpu(state)  # type: ignore[no-any-return]


def load_optimizer(inner: nn.Module, optimizer: DPOptimizer, state: dict[str, Any]) -> None:
    """Load what :func:`optimizer_state` gave, however either model is wrapped."""
    import torch.distributed.checkpoint.state_dict as dcp  # slow to import

    groups = state.get("param_groups", [])
    by_name = any(isinstance(p, str) for group in groups for p in group["params"])
    if not state.get("state"):  # torch loads no empty state by name (SGD, no momentum)
        forget_state(optimizer.original_optimizer)
        for own, saved in zip(optimizer.param_groups, groups, strict=True):
            own.update({name: value for name, value in saved.items() if name != "params"})
    elif by_name or is_fsdp(inner):
        options = dcp.StateDictOptions(full_state_dict=True)
        state = state if by_name else _by_name(inner, optimizer, state)
        model = unwrapped(inner)
        dcp.set_optimizer_state_dict(model, optimizer.original_optimizer, state, options=options)
    else:
        optimizer.load_state_dict(state)


def _by_name(inner: nn.Module, optimizer: DPOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer over whole parameters, whose parameters are numbered."""
    import torch.distributed.checkpoint.state_dict as dcp  # slow to import

    own = dcp.get_optimizer_state_dict(inner, optimizer.original_optimizer)
    names = [name for group in own["param_groups"] for name in group["params"]]  # type: ignore
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, names, strict=True))
    groups = [{**g, "params": [name_of[n] for n in g["params"]]} for g in state["param_groups"]]
    values = {name_of[number]: value for number, value in state["state"].items()}
    return {"state": values, "param_groups": groups}


# --- noise multiplier and clipping norm ---


def privacy_parameters(optimizer: DPOptimizer) -> dict[str, Any]:
    """Noise multiplier, C and the plan, as a checkpoint has them."""
    return {
        "noise_multiplier": optimizer.noise_multiplier,
        "max_grad_norm": optimizer.max_grad_norm,
        **({} if optimizer.plan is None else {_PLAN: optimizer.plan.state_dict()}),
    }


def check_plan(optimizer: DPOptimizer, saved: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose epsilon is for another unit or kind of sampling.

    Args:
        optimizer: The private optimizer.
        saved: What :func:`privacy_parameters` returned.

    Raises:
        ValueError: See :meth:`opacus.planning.Plan.check`.
    """
    if optimizer.plan is not None and _PLAN in saved:
        optimizer.plan.check(saved[_PLAN])


def warn_of_changes(optimizer: DPOptimizer, saved: Mapping[str, Any]) -> None:
    """The run's own settings win over the file; a difference is warned of.

    The accountant records noise multiplier and rate of each step, so that epsilon is right anyhow.
    """
    before = _numbers(saved)
    changes = [
        f"{name} = {before[name]} (now {value})"
        for name, value in _numbers(privacy_parameters(optimizer)).items()
        if name in before and not _close(before[name], value)
    ]
    if changes:
        warnings.warn(
            f"the checkpoint was saved with {', '.join(changes)}; the run goes on with its own "
            "settings",
            stacklevel=4,
        )


def _numbers(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the noise of a step and its amplification by sampling depend on, as far as known."""
    plan = parameters.get(_PLAN) or {}
    found = {name: plan[name] for name in ("sample_rate", "expected_batch_size") if name in plan}
    return found | {name: value for name, value in parameters.items() if name != _PLAN}


def _close(a: Any, b: Any) -> bool:
    first, second = (torch.as_tensor(v, dtype=torch.float64, device="cpu") for v in (a, b))
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-6, atol=0.0)


# --- files ---


def _read(path: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return torch.load(path, **kwargs)  # type: ignore[no-any-return]
    except (EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{_name(path)} cannot be read as a checkpoint: {type(error).__name__}: {error}. "
            "Nothing was loaded"
        ) from error


def _write(path: Any, checkpoint: dict[str, Any], kwargs: dict[str, Any], one_writer: bool) -> None:
    if not isinstance(path, (str, os.PathLike)):
        torch.save(checkpoint, path, **kwargs)
        return
    if not one_writer or dist.get_rank() == 0:
        # No other rank's, which may have the same number on another host.
        unfinished = f"{os.fspath(path)}.{os.urandom(8).hex()}.tmp"
        try:
            torch.save(checkpoint, unfinished, **kwargs)
            os.replace(unfinished, path)
        finally:
            if os.path.exists(unfinished):
                os.remove(unfinished)
    if one_writer:
        dist.barrier()


def to_cpu(value: Any) -> Any:
    """The tensors in dictionaries and lists, on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    return [to_cpu(v) for v in value] if isinstance(value, list) else value


def _name(path: Any) -> str:
    return f"file {os.fspath(path)}" if isinstance(path, (str, os.PathLike)) else "the buffer"
