"""The environment of the libraries that benchmarks compare with, apart from the project's own."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from tools.bench.results import ROOT

__all__ = ["Library", "peer_python"]

_REQUIREMENTS = Path(__file__).with_name("peers.txt")


def peer_python(folder: Path) -> Path:
    """The interpreter of an environment with everything in peers.txt, made when it is not there.

    The list is complete, so nothing is resolved: some of the libraries ask for versions that exclude each
    other, but run with those listed. torch comes first, with the arguments in UNIRL_TORCH_ARGS.
    """
    wanted = hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()[:16]
    environment = folder / f"peers-{wanted}"
    python = environment / "bin" / "python"
    done = environment / "complete"
    if not done.exists():
        print(f"making {environment}", file=sys.stderr)
        venv.create(environment, clear=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-qq", "--no-deps"]
        torch = next(line for line in _REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
        torch_arguments = shlex.split(os.environ.get("UNIRL_TORCH_ARGS", ""))
        subprocess.run([*install, *torch_arguments, torch], check=True)
        subprocess.run([*install, "-r", str(_REQUIREMENTS)], check=True)
        done.touch()
    return python


class Library:
    """A process that runs the tasks of one module of `storage_libraries` or `loader_libraries`."""

    def __init__(self, python: Path, module: str, log: Path, *, package: str = "storage_libraries") -> None:
        self.module = module
        self._log = log.open("a")
        command = [str(python), "-m", "tools.bench.storage_libraries.serve", f"{package}.{module}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Of the process; its workers are below it."""
        return self._process.pid

    def ask(self, do: str, task: str, **details: Any) -> dict[str, Any]:
        """The answer to one request; {"error": text} when the library failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "task": task, **details}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": f"the process ended, see {self._log.name}"}

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._log.close()
