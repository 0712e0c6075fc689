"""Compare the algorithms with verl and OpenRLHF themselves, in an environment of their own.

    python -m tools.oracle [--folder runs/oracle]

The environment is made once. Both ask for versions that exclude each other and what is tested here, so they
are installed without what they need, beside the few packages that their algorithms import.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path(__file__).with_name("oracle.txt")
PEERS = ("verl==0.9.1", "openrlhf==0.11.2")


def main() -> int:
    """Make the environment where it is missing and run `tests/oracle` in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "oracle")
    python = environment(parser.parse_args().folder)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "tests/oracle",
    ]
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def environment(folder: Path) -> Path:
    """The interpreter of a complete environment."""
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        print(f"making {folder}", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-qq"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        torch_arguments = shlex.split(os.environ.get("UNIRL_TORCH_ARGS", ""))
        subprocess.run([*install, *constraints, *torch_arguments, "torch"], check=True)
        subprocess.run([*install, *constraints, "-r", str(REQUIREMENTS)], check=True)
        subprocess.run([*install, "--no-deps", *PEERS], check=True)
        done.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
