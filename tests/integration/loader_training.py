"""A training on two ranks over gloo that can be killed at any instant and started again.

python loader_training.py STORE RUN [--kills N --seed N]

The parent forks the ranks after the imports, kills one of them by SIGKILL at a random instant, ends the other
one, as a launcher would, and starts both again until the training is through.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from datapipe import ImageField, Loader
from datapipe.transforms import HorizontalFlip, RandomCrop
from storage import FeatureStore

NUM_RANKS = 2
NUM_STEPS = 90
SAVE_EVERY = 2


def main() -> None:
    """Run the training to its end, with as many kills as are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.run.mkdir(parents=True)
    _load_what_torch_loads_late()
    chance = random.Random(options.seed)
    for start in range(options.kills + 1):
        meeting = options.run / f"meeting-{start}"
        ranks = [_fork(options.store, options.run, rank, meeting) for rank in range(NUM_RANKS)]
        if start < options.kills:
            _wait_for_step(options.run, _last_step(options.run) + chance.randint(1, 6))
            time.sleep(chance.random() * 0.05)
            os.kill(chance.choice(ranks), signal.SIGKILL)
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        wanted = -signal.SIGKILL if start < options.kills else 0
        if any(code != wanted for code in codes):
            sys.exit(f"start {start} ended with {codes}, wanted {wanted}")


def _load_what_torch_loads_late() -> None:
    """An optimizer's first step imports a compiler for seconds, which each start would do again."""
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()


def _fork(store: Path, run: Path, rank: int, meeting: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        train(store, run, rank, meeting)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def train(store: Path, run: Path, rank: int, meeting: Path) -> None:
    """Take up the newest checkpoint, if there is one, and train to the end."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=120),
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 12 * 12, 16), torch.nn.Tanh())
    head = torch.nn.Linear(16 + 4, 1)
    weights = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    loader = _loader(store, rank)
    losses: list[str] = []
    checkpoint = run / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for weight, value in zip(weights, saved["weights"]):
            weight.data.copy_(value)
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["loader"]))
        losses = saved["losses"]
    for batch in loader.forever():
        hidden = torch.cat([model(batch.images), batch.tensors["codes"].float() / 100], dim=1)
        wanted = torch.tensor(batch.columns["number"], dtype=torch.float32)[:, None] / 50
        loss = ((head(hidden) - wanted) ** 2).sum() / 8
        optimizer.zero_grad()
        loss.backward()
        whole = loss.detach().clone()
        for tensor in (whole, *(weight.grad for weight in weights)):
            dist.all_reduce(tensor)
        optimizer.step()
        losses.append(float(whole).hex())
        if rank == 0:
            (run / "step").write_text(str(len(losses)))
            if len(losses) % SAVE_EVERY == 0:
                state: dict[str, Any] = {
                    "weights": [weight.data for weight in weights],
                    "optimizer": optimizer.state_dict(),
                    "loader": json.dumps(loader.state_dict()),
                    "losses": losses,
                }
                torch.save(state, run / "checkpoint.tmp")
                (run / "checkpoint.tmp").replace(checkpoint)
        if len(losses) == NUM_STEPS:
            break
    dist.barrier()


def _loader(store: Path, rank: int) -> Loader:
    """Twelve steps of an epoch, the last of them with five rows for two ranks."""
    return Loader(
        FeatureStore.open(store).select(),
        batch_size=8,
        image=ImageField(size=(16, 16), transforms=(RandomCrop((12, 12)), HorizontalFlip())),
        tensors=["codes"],
        columns=["number"],
        seed=7,
        drop_last=False,
        rank=rank,
        world_size=NUM_RANKS,
    )


def _last_step(run: Path) -> int:
    return int(text) if (run / "step").exists() and (text := (run / "step").read_text()) else 0


def _wait_for_step(run: Path, step: int) -> None:
    ends_at = time.monotonic() + 120
    while _last_step(run) < min(step, NUM_STEPS - 1) and time.monotonic() < ends_at:
        time.sleep(0.005)


if __name__ == "__main__":
    main()
