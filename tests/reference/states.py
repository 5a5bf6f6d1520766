"""States that one package saves and the other loads: layers, checkpoints, accountants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import opacus.layers as dp
from opacus.accountants import create_accountant
from opacus.schedulers import ExponentialNoise, StepGradClip
from tests.reference.layers import redraw
from tests.reference.training import Private, private, step, values

# How to make it, and the shape of its input.
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "DPRNN": (lambda: dp.DPRNN(6, 4, num_layers=2, batch_first=True), (3, 5, 6)),
    "DPGRU": (lambda: dp.DPGRU(6, 4, bidirectional=True, batch_first=True), (3, 5, 6)),
    "DPLSTM": (lambda: dp.DPLSTM(6, 4, num_layers=2, bidirectional=True), (5, 3, 6)),
    "DPMultiheadAttention": (lambda: dp.DPMultiheadAttention(6, 2, add_bias_kv=True), (5, 3, 6)),
    "SequenceBias": (lambda: dp.SequenceBias(6), (5, 3, 6)),
}
ENGINES = {"engine-hooks": "hooks", "engine-ghost": "ghost", "engine-functorch": "functorch"}
ACCOUNTANTS = ("rdp", "gdp", "prv")
NAMES = (*LAYERS, *ENGINES, *ACCOUNTANTS)
BEFORE, AFTER = 3, 2  # steps before and after the checkpoint


def save(name: str, folder: Path) -> dict[str, Any]:
    """Save a state into ``folder``; returns what another package should get out of it."""
    path = folder / f"{name}.pt"
    if name in LAYERS:
        layer = redraw(LAYERS[name][0]().double())
        torch.save(layer.state_dict(), path)
        return {"output": _output(name, layer)}
    if name in ACCOUNTANTS:
        accountant = create_accountant(name)
        for _ in range(5):
            accountant.step(noise_multiplier=2.0, sample_rate=0.1)
        torch.save(accountant.state_dict(), path)
        return _spent(accountant)
    run = private("channels", ENGINES[name])
    schedules = _schedules(name, run)
    for _ in range(BEFORE):
        _step(run)
        for schedule in schedules.values():
            schedule.step()
    engine, module, optimizer, *_ = run
    parts = {"module": module, "optimizer": optimizer, **schedules}
    engine.save_checkpoint(path=path, checkpoint_dict={"note": "mine"}, **parts)
    # By themselves too: what users load without the engine.
    torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.2")
    return _continued(run, schedules) | {"note": "mine"}


def load(name: str, folder: Path) -> dict[str, Any]:
    """What this package gets out of a state in ``folder``."""
    path = folder / f"{name}.pt"
    if name in LAYERS:
        layer = LAYERS[name][0]().double()
        layer.load_state_dict(torch.load(path))
        return {"output": _output(name, layer)}
    if name in ACCOUNTANTS:
        accountant = create_accountant(name)
        accountant.load_state_dict(torch.load(path))
        return _spent(accountant)
    run = private("channels", ENGINES[name])
    schedules = _schedules(name, run)
    engine, module, optimizer, *_ = run
    parts = {"module": module, "optimizer": optimizer, **schedules}
    note = engine.load_checkpoint(path=path, **parts)["note"]
    states = torch.load(f"{path}.2")
    module.load_state_dict(states["module"])
    optimizer.load_state_dict(states["optimizer"])
    return _continued(run, schedules) | {"note": note}


def _output(name: str, layer: nn.Module) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(LAYERS[name][1], dtype=torch.float64)
    output = layer(x, x, x) if "Attention" in name else layer(x)
    return (output[0] if isinstance(output, tuple) else output).detach()


def _spent(accountant: Any) -> dict[str, Any]:
    accountant.step(noise_multiplier=2.0, sample_rate=0.1)
    history = [tuple(entry) for entry in accountant.history]
    return {"history": history, "epsilon": float(accountant.get_epsilon(1e-5))}


def _schedules(name: str, run: Private) -> dict[str, Any]:
    schedules: dict[str, Any] = {"noise_scheduler": ExponentialNoise(run[2], gamma=0.9)}
    if name != "engine-ghost":  # where Opacus' schedules change the noise, not the clipping
        schedules["grad_clip_scheduler"] = StepGradClip(run[2], step_size=2, gamma=0.5)
    return schedules


def _step(run: Private) -> None:
    step(run, next(iter(run[4])))


def _continued(run: Private, schedules: dict[str, Any]) -> dict[str, Any]:
    """The model after further steps, the history, the epochs of the schedules.

    The clipping norm is set by hand: Opacus does not restore the value of a schedule.
    """
    engine, module, optimizer, *_ = run
    if "grad_clip_scheduler" in schedules:
        optimizer.max_grad_norm = 0.2
    for _ in range(AFTER):
        _step(run)
    return {
        "model": values(module),
        "momentum": [
            state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()
        ],
        "history": engine.accountant.history,
        "epochs": [schedule.last_epoch for schedule in schedules.values()],
    }
