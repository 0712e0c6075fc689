from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, since setuptools leaves its build folder beside pyproject.toml
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("unirl-*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".j2"} or path.name == "py.typed"
    }
    assert wanted - set(names) == set()
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
