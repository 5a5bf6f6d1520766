"""Two torchrun agents on one host stand for two machines; one of them is lost."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.scripts import run_script
from tests.helpers.warm_python import warm_python

JOB = Path(__file__).with_name("multinode_job.py")
ROOT = Path(__file__).parents[2]
STEPS = 10
# A lost agent is noticed, and the rest goes on without it, in seconds instead of minutes.
QUICK = "join_timeout=60,last_call_timeout=1,close_timeout=3"
PATIENCE = 150
ENVIRONMENT = {
    "OPACUS_REPRODUCIBLE": "1",  # a resumed run draws the noise that the whole one drew
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    # Else a restarted worker may find keys of its predecessor in the agents' store, and hang.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Agents:
    """torchrun agents, each with a process group of its own, so that it can be lost as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self, nodes: str, port: int, job: tuple[Any, ...], restarts: int, python: str
    ) -> None:
        """One agent; `python` runs its workers."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", str(restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
            *("--rdzv-id", "test", "--rdzv-conf", QUICK, "--monitor-interval", "0.2"),
            *("--local-addr", "localhost", str(JOB), *map(str, job)),
        ]
        number = len(self.started)
        with open(self.folder / f"agent-{number}.out", "wb") as out:
            self.started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **ENVIRONMENT, "PYTHON_EXEC": python},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def wait(self, number: int) -> None:
        self.until(lambda: self.started[number].poll() is not None)
        assert self.started[number].returncode == 0, self.output()

    def kill(self, number: int) -> None:
        """The machine is gone: agent and workers at once, without a last word.

        Workers have process groups of their own, and are known by their parent.
        """
        agent = self.started[number]
        if agent.poll() is None:
            for pid in [agent.pid, *children_of(agent.pid)]:
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def output(self) -> str:
        paths = sorted(self.folder.glob("agent-*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in paths)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    started = Agents(tmp_path)
    yield started
    for number in range(len(started.started)):
        started.kill(number)


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def free_port() -> int:
    """Free now, and not one that the system may give to somebody before it is used."""
    while True:
        port = random.randrange(15_000, 30_000)
        if not hosts_rendezvous(port):
            return port


def log_of(folder: Path, rank: int) -> list[list[int]]:
    """World size, step resumed from, step, process id: of each step taken."""
    path = folder / f"log-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(word) for word in line.split()] for line in lines]


def end_of(folder: Path, rank: int) -> dict[str, Any]:
    end: dict[str, Any] = torch.load(folder / f"end-{rank}.pt")
    return end


def steps_of(log: list[list[int]], world: int) -> list[int]:
    return [step for size, _, step, _ in log if size == world]


@pytest.mark.slow
def test_two_nodes_a_killed_rank_and_a_lost_node(agents: Agents, tmp_path: Path) -> None:
    whole, killed, lost = (tmp_path / name for name in ("whole", "killed", "lost"))
    for folder in (whole, killed, lost):
        folder.mkdir()

    # Nothing happens, and nothing but the two ranks is started.
    environment = {**os.environ, **ENVIRONMENT, "GROUP_WORLD_SIZE": "1"}
    done = run_script(JOB, whole, STEPS, 0, folder=ROOT, ranks=2, env=environment)
    assert done.returncode == 0, done.stderr
    for a, b in zip(end_of(whole, 0)["weights"], end_of(whole, 1)["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)

    # A worker is killed; both agents restart theirs, and the run ends as if nothing had been.
    port = free_port()
    for _ in range(2):
        agents.start("2", port, (killed, 3, 0.5), restarts=2, python=warm_python())
    agents.until(lambda: len(log_of(killed, 1)) >= 3)
    os.kill(log_of(killed, 1)[-1][-1], signal.SIGKILL)
    for number in (0, 1):
        agents.wait(number)
    assert end_of(killed, 0)["hosts"] == "2"
    log = log_of(killed, 0)
    assert 3 <= log[-1][1] < STEPS and log[-1][3] != log[0][3]
    assert_same_end(killed, whole)

    # A node is lost for good; the other one goes on alone. Epsilon is the same all the same.
    port = free_port()
    for _ in range(2):
        # A worker that starts at once would be done before the other agent has come.
        agents.start("1:2", port, (lost, 3, 1.0), restarts=3, python=sys.executable)
        agents.until(lambda: hosts_rendezvous(port))  # the first one hosts it, and is not lost
    agents.until(lambda: len(log_of(lost, 0)) >= 3 and len(log_of(lost, 1)) >= 3)
    agents.kill(3)
    agents.wait(2)
    log = log_of(lost, 0)
    assert steps_of(log, 2)[:3] == [1, 2, 3] and steps_of(log, 1)[-1] == STEPS
    assert {line[1] for line in log if line[0] == 1} == {steps_of(log, 1)[0] - 1}
    end = end_of(lost, 0)
    assert end["hosts"] == "1"
    assert end["history"] == end_of(whole, 0)["history"]
    assert end["epsilon"] == end_of(whole, 0)["epsilon"]


def hosts_rendezvous(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def assert_same_end(folder: Path, whole: Path) -> None:
    first, second = end_of(folder, 0), end_of(whole, 0)
    assert first["epsilon"] == second["epsilon"] and first["history"] == second["history"]
    for a, b in zip(first["weights"], second["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
