from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

import unirl

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("storage", "datapipe", "unirl", "recipes")


def _pins() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): pinned for name, pinned in pins}


def _requirements(extras: tuple[str, ...]) -> list[Requirement]:
    optional = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in optional[extra])]
    return [Requirement(line) for line in lines if not line.startswith("unirl[")]


def test_the_version_is_the_same_everywhere() -> None:
    assert unirl.__version__ == PROJECT["version"] == version("unirl")
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert released[0] == PROJECT["version"]


def test_the_constraints_pin_what_the_project_asks_for() -> None:
    pins = _pins()
    for requirement in _requirements(("dev", "notebook")):
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{requirement} is pinned to {pinned}"


def test_the_console_command_starts() -> None:
    (command,) = (entry for entry in entry_points(group="console_scripts") if entry.name == "unirl")
    assert command.value == PROJECT["scripts"]["unirl"]
    script = Path(sys.executable).with_name("unirl")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ingest" in done.stdout


def test_types_are_marked_for_other_projects() -> None:
    for package in ("storage", "datapipe", "unirl"):
        assert (ROOT / package / "py.typed").exists()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, from a copy, since setuptools leaves a build folder beside pyproject.toml."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=source)
    (archive,) = out.glob("unirl-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel as somebody makes it who has only the source archive; nothing is downloaded."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(sdist.parent), str(sdist)], check=True, capture_output=True)
    (wheel,) = sdist.parent.glob("unirl-*.whl")
    return wheel


def _wanted() -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".j2", ".yaml", ".sbatch"} or path.name == "py.typed"
    }


@pytest.mark.slow
def test_the_source_archive_holds_what_the_wheel_is_made_of(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert _wanted() | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert _wanted() - set(names) == set()
    assert {name.split("/")[0] for name in names} == set(PACKAGES)


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment; the library itself comes from the wheel alone."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import storage, datapipe, recipes, unirl; print(unirl.__version__, unirl.__file__)"
    assert run(python, "-c", code).split() == [unirl.__version__, str(site / "unirl" / "__init__.py")]
    command = tmp_path / "venv" / "bin" / "unirl"
    assert "ingest" in run(command, "--help")
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "pictures" / "red.png")
    (tmp_path / "pictures" / "red.txt").write_text("a red square")
    run(command, "ingest", "pictures", "store")
    assert "a red square" in run(command, "query", "store", "select caption from samples")
