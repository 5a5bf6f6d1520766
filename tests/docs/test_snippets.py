"""The Python of the documentation runs as it is printed, and shows what really comes out.

A block whose first line names a file (`# train.py`) is that file; one that starts a process group is
run on two gloo processes. The other blocks of a page are one script, from top to bottom. The first of
each is run as a reader would, by the interpreter and by torchrun.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.distributed import preload
from tests.helpers.scripts import run_script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ["quickstart.md", "zh/quickstart.md", "modes.md", "auditing.md", "index.md", "../README.md"]
OTHERS = [
    "huggingface.md",
    "accelerate.md",
    "lightning.md",
]  # other people's tools, which warn of other people's changes
ON_RANKS = ["quickstart.md", "zh/quickstart.md", "fsdp.md", "../README.md", "huggingface.md"]
# How a script says that it is for several processes.
STARTS_RANKS = ("init_process_group", "fsdp=True")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")


@dataclass
class Page:
    """What is printed on a page.

    Attributes:
        files: Contents of the files that blocks name.
        script: The Python blocks that name none.
        outputs: Blocks of text: what the script is said to print.
    """

    files: dict[str, str] = field(default_factory=dict)
    script: str = ""
    outputs: list[str] = field(default_factory=list)

    @property
    def distributed(self) -> list[str]:
        files = self.files.items()
        return [name for name, text in files if any(word in text for word in STARTS_RANKS)]


def read(name: str) -> Page:
    page = Page()
    for language, text in FENCE.findall((DOCS / name).read_text(encoding="utf-8")):
        if language == "python":
            named = FILE.match(text)
            if named:
                page.files[named[1]] = text
            else:
                page.script += text
        elif language == "text":
            page.outputs.append(text)
    return page


# Threads of PyTorch may abort a process that has done its work and is ending: on a busy CPU one run in
# ten of FSDP2 on gloo, also without this package.
ABORTED = "terminate called without an active exception"


QUIET = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
preload(
    "transformers.trainer", "transformers.models.llama.modeling_llama", "trl.trainer.dpo_trainer"
)


def write(page: Page, folder: Path) -> None:
    for name, text in {**page.files, "page.py": page.script}.items():
        (folder / name).write_text(text, encoding="utf-8")


def forked(script: str, folder: Path, ranks: int = 0, strict: bool = False) -> str:
    done = run_script(
        folder / script,
        folder=folder,
        path=[ROOT],
        ranks=ranks,
        strict=strict,
        env={**os.environ, **QUIET},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(folder: Path, *command: str, tries: int = 5) -> str:
    path = os.pathsep.join([str(ROOT), str(folder)])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **QUIET},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode and ABORTED in done.stderr and tries > 1:
        return run(folder, *command, tries=tries - 1)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plan_of(text: str) -> list[tuple[str, ...]]:
    """Head, and name and class of each layer, of what `explain()` prints."""
    lines = [line.split() for line in text.splitlines()]
    start = next(i for i, words in enumerate(lines) if words[:2] == ["layer", "kind"])
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    body = [words for words in lines[start + 1 : end] if len(words) > 7]
    return [tuple(lines[start]), *((words[0], words[1]) for words in body)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PAGES, *OTHERS])
def test_a_page_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    page = read(name)
    assert page.script
    write(page, tmp_path)
    if name == PAGES[0]:
        out = run(tmp_path, "-W", "error", "page.py")
    else:
        out = forked("page.py", tmp_path, strict=name not in OTHERS)
    for expected in page.outputs:
        assert plan_of(expected) == plan_of(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "script"), [(n, s) for n in ON_RANKS for s in read(n).distributed]
)
def test_a_distributed_script_runs_on_two_processes(name: str, script: str, tmp_path: Path) -> None:
    write(read(name), tmp_path)
    if name == ON_RANKS[0]:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
        out = run(tmp_path, *torchrun, script)
    else:
        out = forked(script, tmp_path, ranks=2)
    assert out.strip(), "it prints nothing that a reader could compare"


def test_the_pages_that_promise_it_have_a_distributed_script() -> None:
    for name in ON_RANKS:
        assert read(name).distributed, name


def test_both_languages_have_the_same_code() -> None:
    english, chinese = (without_comments(read(name)) for name in PAGES[:2])
    assert english == chinese


def without_comments(page: Page) -> dict[str, str]:
    """Code without comments and docstrings, which are in the language of the page."""
    code = {**page.files, "": page.script}
    bare = {k: re.sub(r"  #.*$|^\s*#.*\n", "", v, flags=re.MULTILINE) for k, v in code.items()}
    return {k: re.sub(r'^\s*""".*"""\n', "", v, flags=re.MULTILINE) for k, v in bare.items()}
