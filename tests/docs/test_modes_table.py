"""The table of modes lists every mode, and each runs where the table says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.step.modes import AUTO, MODES
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import run_distributed

PAGE = Path(__file__).parents[2] / "docs" / "modes.md"
# What these do is up to the user, and to how the model is split.
ELSEWHERE = {"no_op", "ghost_tp"}


def table() -> dict[str, dict[str, str]]:
    """The cells of each mode by the heads of their columns."""
    text = PAGE.read_text()
    lines = text[text.index("| `grad_sample_mode` |") :].split("\n\n")[0].splitlines()
    heads = _cells(lines[0])
    rows = [_cells(line) for line in lines[2:]]
    return {row[0].split("`")[1]: dict(zip(heads, row, strict=True)) for row in rows}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def train(module: nn.Module, mode: str) -> None:
    """One epoch."""
    engine = PrivacyEngine()
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    model, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()


def runs(module: nn.Module, mode: str) -> bool:
    """Whether the mode takes the model; then it must also train it."""
    try:
        train(module, mode)
    except ValueError as error:
        assert any(word in str(error) for word in ("FSDP2", "process group")), error
        return False
    return True


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def on_two_ranks(rank: int, world_size: int) -> dict[str, tuple[bool, bool]]:
    """Whether each mode runs under DDP and under FSDP2."""
    found = {}
    for mode in (*MODES, AUTO):
        if mode not in ELSEWHERE:
            ddp = runs(nn.parallel.DistributedDataParallel(model()), mode)
            found[mode] = (ddp, runs(FSDP2Wrapper(model()), mode))
    return found


def test_every_mode_has_a_row() -> None:
    assert sorted(table()) == sorted([*MODES, AUTO])


def test_the_number_of_backward_passes_is_that_of_the_strategy() -> None:
    passes = {"materialise": "1", "two_pass": "2", "one_pass": "1"}
    for name, cells in table().items():
        if name != AUTO and MODES[name].samples != "user":
            assert cells["backward passes"] == passes[MODES[name].strategy], name


@pytest.mark.parametrize("mode", [m for m in (*MODES, AUTO) if m not in ELSEWHERE])
def test_modes_run_in_one_process_where_the_table_says_so(mode: str) -> None:
    assert runs(model(), mode) == (table()[mode]["one process"] == "yes")


@pytest.mark.slow
def test_modes_run_on_ranks_where_the_table_says_so() -> None:
    for mode, (ddp, fsdp) in run_distributed(on_two_ranks, 2)[0].items():
        cells = table()[mode]
        assert ddp == (cells["DDP"] == "yes"), mode
        assert fsdp == cells["FSDP2, HSDP"].startswith("yes"), mode
