"""Writers that are killed at any of their system calls; `make soak` does it two hundred times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_two_writers_killed_at_random_instants_of_every_action(tmp_path):
    command = [sys.executable, "-m", "tools.soak.kills", "--kills", "14", "--seed", "3"]
    done = subprocess.run(
        [*command, "--path", str(tmp_path / "store")], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout.splitlines()[-1].partition("kills: ")[2])
    assert sum(killed.values()) >= 12 and all(killed.values())


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_point_of_every_action():
    command = [sys.executable, "-m", "tools.soak.filling", "--tries", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
