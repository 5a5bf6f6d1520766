"""How far a reader of one private step has to walk: files entered, and moves between them.

    python tests/tools/step_walk.py --mode ghost_bk

Profiles one step (forward, backward, optimizer step, zero_grad) of eight linear layers on the CPU
after a warm-up. A *stay* is a run of calls of functions of one file of the package; a *move* is a
call in another file than the call before; a *return* leads back to the file that was just left.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus
from opacus import PrivacyEngine

PACKAGE = Path(opacus.__file__).parent
LAYERS = 8
# Runs when the backward pass comes to a layer.
TAP = "_TapOne.backward"


@dataclass
class Walk:
    """The files of the package that a step went through, in order."""

    path: list[str] = field(default_factory=list)
    _backwards: list[int] = field(default_factory=list)  # places in it where a layer's begins

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function: every call of a Python function of the package."""
        if event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(str(PACKAGE)) and (not self.path or self.path[-1] != name):
            self.path.append(name)
        if frame.f_code.co_qualname == TAP:
            self._backwards.append(len(self.path) - 1)

    @property
    def files(self) -> Counter[str]:
        """Files entered, and how often."""
        return Counter(str(Path(name).relative_to(PACKAGE)) for name in self.path)

    @property
    def moves(self) -> int:
        """Moves between files."""
        return max(0, len(self.path) - 1)

    @property
    def returns(self) -> int:
        """Moves that lead back to the file that was just left."""
        return _returns(self.path)

    def one_backward(self) -> tuple[int, int]:
        """Stays and returns from where a layer's backward begins to where the next one's does."""
        start, end = self._backwards[1:3]
        return end - start, _returns(self.path[start:end])


def _returns(path: list[str]) -> int:
    return sum(a == b for a, b in zip(path, path[2:], strict=False))


def private_step(mode: str) -> Any:
    """A function that runs one private step of eight linear layers in ``mode``."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS // 2) for layer in (nn.Linear(8, 8), nn.Linear(8, 8))]
    model = nn.Sequential(*layers)
    x, y = torch.randn(4, 8), torch.randint(0, 8, (4,))
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    private, optimizer = made[0], made[1]
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(private(x), y).backward()
        optimizer.step()

    return step


def walk_of(mode: str) -> Walk:
    """The walk of one step, after three that warm up what is remembered."""
    step, walk = private_step(mode), Walk()
    for _ in range(3):
        step()
    before = sys.getprofile()
    sys.setprofile(walk.note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return walk


def main() -> None:
    """Print files and moves of one mode."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mode", default="ghost_bk")
    mode = parser.parse_args().mode
    walk = walk_of(mode)
    for name, count in walk.files.most_common():
        print(f"{count:5}  {name}")
    print(f"{mode}: {len(walk.files)} files, {walk.moves} moves, {walk.returns} returns")
    print("backward of one layer: {} stays, {} returns".format(*walk.one_backward()))


if __name__ == "__main__":
    main()
