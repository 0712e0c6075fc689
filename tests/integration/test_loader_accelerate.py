"""A loader beside Accelerate: it splits for itself, and `prepare` leaves it alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage import FeatureStore

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datapipe import Loader
from storage import FeatureStore

accelerator = Accelerator(cpu=True)
loader = Loader(
    FeatureStore.open(sys.argv[1]).select(),
    batch_size=6,
    image=None,
    columns=(),
    drop_last=False,
    rank=accelerator.process_index,
    world_size=accelerator.num_processes,
)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
assert prepared is loader and len(prepared) == 4
seen = [gather_object(batch.keys) for batch in prepared]
prepared.set_epoch(1)
other = gather_object(next(iter(prepared)).keys)
if accelerator.is_main_process:
    print(json.dumps([seen, other]))
"""


def test_prepare_hands_the_loader_back_and_the_shares_stay_exact(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    store.append({"key": f"{index:02d}"} for index in range(20))
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    root = Path(__file__).parents[2]
    found = []
    for ranks in ("1", "2"):
        done = subprocess.run(
            [sys.executable, *launch, ranks, str(tmp_path / "script.py"), str(store.path)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]
    seen, other = found[0]
    assert [len(keys) for keys in seen] == [6, 6, 6, 2]
    assert sorted(key for keys in seen for key in keys) == [f"{index:02d}" for index in range(20)]
    assert other != seen[0]
