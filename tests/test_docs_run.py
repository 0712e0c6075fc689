"""Every page runs: its Python and its commands, from top to bottom, in a folder with what it speaks of.

A block that needs a GPU, a cluster, a server or minutes says so in a comment before it, and stands in
`NOT_RUN`. The walks in tests/integration/walks run three how-tos, each with its own files.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from unirl.cli import main

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "docs_blocks.py")))
WALKED = ("howto_own_data.md", "howto_score_folder.md", "howto_resume_compare.md")
RUN_LANGUAGES = ("python", "bash", "console")

NEEDS: dict[str, tuple[str, ...]] = {
    "care.md": ("files", "stores"),
    "checkpoints.md": ("runs",),
    "cli.md": ("files", "stores", "runs"),
    "explore.md": ("models", "runs"),
    "ingest.md": ("files",),
    "loader.md": ("files", "stores", "models"),
    "policies.md": ("models",),
    "rewards.md": ("models", "runs"),
    "rollout.md": ("models",),
    "video.md": ("files", "stores"),
}
"""Parts of the desk that a page speaks of; other pages begin with an empty folder."""
QUICK = ("columns.md", "storage.md")

NOT_RUN = {
    "README.md": ["make demo", "unirl doctor"],
    "alarms.md": ["unirl train shapes_hacked"],
    "cli.md": ["unirl --install-completion"],
    "distribution.md": ["torchrun"],
    "launch.md": [
        *("unirl train shapes", "accelerate launch --config_file eight_gpus.yaml"),
        *("accelerate launch --config_file two_nodes.yaml", "python -m recipes.launch.ranks", "sbatch"),
        *("export UNIRL_ROLLOUT_TOKEN", "unirl train janus_pro_t2i"),
    ],
    "recipes.md": [
        *(
            "unirl train motion",
            "unirl ingest prompts.txt",
            "unirl join models/llama",
            "unirl ingest questions",
        ),
        *("python -m recipes.qwen_vl_reward", "unirl reward serve"),
    ],
    "rewards.md": ["unirl reward label", "unirl train numbers"],
    "vllm.md": [
        *("pip install", "from pathlib import Path", "unirl rollout serve", "export UNIRL_ROLLOUT_TOKEN=8Zk"),
        *("export UNIRL_ROLLOUT_TOKEN=$(openssl", "ssh"),
    ],
}
"""How the marked blocks of each page begin."""
REASONS = ("needs a GPU", "needs a cluster", "needs a server", "takes minutes", "writes into the home folder")
FINDS_DAMAGE = ("unirl verify damaged", "unirl repair damaged --dry-run", "unirl repair damaged")


def runnable(page: Path) -> list[Any]:
    return [block for block in BLOCKS.blocks(page) if block.language in RUN_LANGUAGES and not block.not_run]


def pages() -> Iterator[Any]:
    for page in BLOCKS.PAGES:
        if page.name not in WALKED and any(not block.title for block in runnable(page)):
            yield pytest.param(page, id=page.name, marks=[] if page.name in QUICK else pytest.mark.slow)


@pytest.fixture(scope="session")
def part(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a finished part of the desk, made when it is first asked for."""
    makers = runpy.run_path(str(ROOT / "tests" / "docs_desk.py"))["PARTS"]
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            if name == "stores":
                shutil.copytree(folder("files"), made[name], dirs_exist_ok=True)
            makers[name](made[name])
        return made[name]

    return folder


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in, whose modules can be imported. What a page sets outside is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before, modules, arguments = dict(os.environ), set(sys.modules), list(sys.argv)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.argv = arguments
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.mark.parametrize("page", pages())
def test_a_page_runs_from_top_to_bottom(
    page: Path, desk: Path, part: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NEEDS.get(page.name, ()):
        shutil.copytree(part(name), desk, dirs_exist_ok=True)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for block in runnable(page):
        if block.title:
            (desk / block.title).write_text(block.code)
        elif block.language == "python":
            run_python(block.code, f"{page.name}: {block.first_line}", vars(module))
        else:
            for command in commands(block):
                if command.startswith("unirl reward train --pairs"):
                    label(desk)
                said = run_command(command)
                assert said.code == (1 if command in FINDS_DAMAGE else 0), f"{command}\n{said.text}"


def run_python(code: str, where: str, names: dict[str, Any]) -> None:
    """Run a program in the page's namespace, or the examples of a session with their answers."""
    if not code.startswith(">>> "):
        exec(compile(code, where, "exec", dont_inherit=True), names)
        return
    session = doctest.DocTestParser().get_doctest(code, names, where, None, None)
    assert doctest.DocTestRunner().run(session).failed == 0, where


def commands(block: Any) -> list[str]:
    """The commands of a shell, or of a console, which shows them behind a `$`."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip()]


def run_command(command: str) -> SimpleNamespace:
    """Run our own programs in this process, and what else there is in a shell."""
    words = shlex.split(command, comments=True)
    target = Path(words[-1]) if words[-2:-1] == [">"] else None
    words = words[:-2] if target else words
    inside = {"unirl": lambda: main(words[1:]), "python": lambda: run_program(words[1:])}.get(words[0])
    if inside is None:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        return SimpleNamespace(code=done.returncode, text=done.stdout + done.stderr)
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    code = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            inside()
        except SystemExit as ended:
            code = int(ended.code or 0)
    data = said.buffer.getvalue()  # type: ignore[attr-defined]
    if target:
        target.write_bytes(data)
    return SimpleNamespace(code=code, text=data.decode("utf-8", "replace"))


def run_program(words: list[str]) -> None:
    """`python FILE ARGUMENTS` or `python -c CODE`."""
    if words[0] == "-c":
        exec(compile(words[1], "-c", "exec", dont_inherit=True), {"__name__": "__main__"})
        return
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def label(desk: Path) -> None:
    """Say of each pair which one is better, as people do."""
    names = re.findall(r'"pair": ("[^"]*")', (desk / "pairs" / "pairs.jsonl").read_text())
    lines = (f'{{"pair": {name}, "label": "first"}}\n' for name in names)
    (desk / "labels.jsonl").write_text("".join(lines))


def test_what_is_not_run_is_little_and_says_why() -> None:
    found: dict[str, list[Any]] = {}
    for page in BLOCKS.PAGES:
        for block in BLOCKS.blocks(page):
            if block.not_run:
                assert block.not_run in REASONS
                found.setdefault(page.name, []).append(block)
    assert found.keys() == NOT_RUN.keys()
    for name, marked in found.items():
        assert len(marked) == len(NOT_RUN[name])
        for block, start in zip(marked, NOT_RUN[name]):
            assert block.code.startswith(start), f"{name}: {block.first_line}"
