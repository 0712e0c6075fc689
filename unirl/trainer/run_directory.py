"""Where a run keeps things, and the record that lets somebody repeat it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unirl.errors import ConfigError

__all__ = ["RunDirectory", "flat_settings", "new_directory", "write_json"]

IDENTITY = frozenset(("recipe", "config", "seed"))
"""What `run.json` says of every run."""
PACKAGES = ("unirl", "torch", "transformers", "accelerate", "pyarrow", "lmdb", "duckdb", "pillow", "numpy")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one, also after a power cut."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    _sync(partial)
    partial.rename(path)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a directory to fill that gets its name when the block ends, and is removed if it fails.

    Raises:
        ConfigError: If there is something under that name already.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ConfigError(f"{path}: there is something in it; name a new folder for the model")
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in (found for found in partial.rglob("*") if found.is_file()):
            _sync(file)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """See a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


class RunDirectory:
    """`runs/NAME`: `run.json`, `metrics.jsonl`, and the folders of checkpoints, references, experience."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record_path = path / "run.json"
        self.checkpoints = path / "checkpoints"
        self.experience = path / "experience"
        self.references = path / "references"

    def check_same(
        self, *, recipe: str, config: Mapping[str, Any], seed: int, defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Check that a run that is here already has the same settings.

        Args:
            recipe: Its name.
            config: Of `recipe_record`.
            seed: Of the run.
            defaults: Of `recipe_defaults`. A setting that the run knows nothing of, since an earlier version
                began it, has to be as here.

        Raises:
            ConfigError: If the directory holds a run with other settings, naming the first that differs.
        """
        if not self.record_path.exists():
            return
        before = self.read()
        now = {"recipe": recipe, "config": json.loads(json.dumps(config)), "seed": seed}
        known = _filled(before["config"], json.loads(json.dumps(defaults or {})))
        begun = {name: before[name] for name in now} | {"config": known}
        found, wanted = flat_settings(begun), flat_settings(now)
        for name in sorted({*found, *wanted}):
            if found.get(name) != wanted.get(name):
                raise ConfigError(
                    f"{self.path}: holds a run with {name} = {found.get(name)!r}, asked for "
                    f"{wanted.get(name)!r}; give the new run another directory"
                )

    def record(
        self, *, recipe: str, config: Mapping[str, Any], seed: int, assignments: Sequence[str]
    ) -> None:
        """Write `run.json`; a run that is continued keeps the one that it has."""
        if self.record_path.exists():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(
            self.record_path,
            {
                "recipe": recipe,
                "config": config,
                "assignments": list(assignments),
                "commit": _commit(),
                "versions": {"python": platform.python_version(), **_versions()},
                "seed": seed,
                "store": None,
                "snapshot": None,
                "reward": None,
                "command": _command(),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )

    def record_store(self, store: Path, snapshot: int) -> None:
        """Note which snapshot of the data the run trains on; one that is noted already stays."""
        record = self.read()
        if record["snapshot"] is None:
            write_json(self.record_path, {**record, "store": str(store), "snapshot": snapshot})

    def record_reward(self, *, version: int, identity: str | None) -> None:
        """Note which reward the run is trained on.

        Raises:
            ConfigError: If the run was started with another one.
        """
        record, now = self.read(), {"version": version, "identity": identity}
        before = record.get("reward")
        if before is None:
            write_json(self.record_path, {**record, "reward": now})
        elif before != now:
            raise ConfigError(
                f"{self.path}: was started with reward version {before['version']} ({before['identity']}), "
                f"found version {version} ({identity}); give a run with another reward another directory"
            )

    def snapshot(self) -> int:
        """The snapshot of the data that the run trains on."""
        return int(self.read()["snapshot"])

    def read(self) -> dict[str, Any]:
        """What `run.json` says.

        Raises:
            ConfigError: If there is none, or it is damaged.
        """
        try:
            record: dict[str, Any] = json.loads(self.record_path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"{self.path}: no {self.record_path.name}, so there is no run to go on with"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"{self.record_path}: cannot be read ({error}); restore it or name another directory"
            ) from error
        missing = sorted(IDENTITY - record.keys()) if isinstance(record, dict) else sorted(IDENTITY)
        if missing:
            raise ConfigError(
                f"{self.record_path}: does not say {', '.join(missing)}, so it is no record of a run; "
                "restore it or name another directory"
            )
        return record


def flat_settings(value: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping from dotted names to plain values."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {path: value}
    return {
        name: leaf
        for key, child in items
        for name, leaf in flat_settings(child, f"{path}.{key}" if path else str(key)).items()
    }


def _filled(record: Any, defaults: Any) -> Any:
    """A record, with the defaults of what it does not know."""
    if isinstance(record, dict) and isinstance(defaults, dict):
        return defaults | {name: _filled(value, defaults.get(name)) for name, value in record.items()}
    if isinstance(record, list) and isinstance(defaults, list):
        return [*map(_filled, record, defaults), *record[len(defaults) :]]
    return record


def _command() -> str:
    """What was typed, without the folders in which this machine keeps its programs."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is None:
        program = Path(sys.argv[0]).name
        return shlex.join([*(["python"] if program.endswith(".py") else []), program, *sys.argv[1:]])
    return shlex.join(["python", "-m", module.name.removesuffix(".__main__"), *sys.argv[1:]])


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Commit of the source tree, None when the library is not run from one."""
    here = Path(__file__).parent
    answer = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or None
