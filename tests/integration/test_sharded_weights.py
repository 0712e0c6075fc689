"""Weights that FSDP2 shards over two processes reach an engine whole, LoRA merged or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_two_ranks_gather_the_weights_of_one(importable: None) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(HERE / "sharded_weights.py"), str(HERE.parent / "toy.py")),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
