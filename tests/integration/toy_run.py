"""The toy run as a program: made to be killed, stopped, continued, and launched on several ranks."""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from storage import FeatureStore
from unirl.config import replace_settings
from unirl.errors import UniRLError
from unirl.rollout.vllm_engine import open_engine
from unirl.trainer.loop import StopAsked
from unirl.trainer.preemption import REQUEUE_EXIT_CODE
from unirl.trainer.sharding import open_accelerator
from unirl.types import Reward, Sample, Scores

TOY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "toy.py")))
TOUCHES = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree"}


def in_child(arguments: Sequence[str], output: Path) -> None:
    """Run in a forked process; what it says goes to a file."""
    with output.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    main(arguments)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--kill-at", type=int, help="touch of a file of the run at which to die")
    parser.add_argument("--pause-s", type=float, default=0.0, help="after every step")
    parser.add_argument("--prompts-per-step", type=int, default=TOY.STAGES[0].prompts_per_step)
    parser.add_argument("--fail-on-rank", type=int, help="the reward fails there in the second step")
    parser.add_argument("--many-things", action="store_true", help="stages that do all that stages can")
    parser.add_argument("--served", action="store_true", help="roll out on the server that the URL names")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run and its value")
    arguments = parser.parse_args(given)
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    settings = replace_settings(TOY.SETTINGS, arguments.set)
    accelerator = open_accelerator(settings.distribution)
    reward = TOY.Likes()
    if arguments.fail_on_rank == accelerator.process_index:
        reward = _Failing(reward)
    policy = TOY.make_served_policy() if arguments.served else TOY.make_policy()

    def on_step(stage: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
        sys.stdout.write(f"{stage} {done}\n")
        sys.stdout.flush()
        time.sleep(arguments.pause_s)

    if arguments.kill_at is not None:
        kill_at(arguments.run, arguments.kill_at)
    try:
        TOY.make_trainer(
            arguments.run,
            FeatureStore.open(arguments.store),
            stages=TOY.MANY_THINGS
            if arguments.many_things
            else [replace(stage, prompts_per_step=arguments.prompts_per_step) for stage in TOY.STAGES],
            settings=replace(settings, micro_batch_tokens=48) if arguments.many_things else settings,
            policy=policy,
            engine=open_engine("vllm", policy) if arguments.served else None,
            accelerator=accelerator,
            reward=reward,
            on_step=on_step,
        ).train()
    except StopAsked:
        sys.exit(REQUEUE_EXIT_CODE)
    except UniRLError as error:
        sys.exit(f"error: {error}")


def kill_at(run: Path, touch: int) -> None:
    """Die by SIGKILL at the n-th time that the process touches a file of the run."""
    left = touch

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in TOUCHES and str(run) in str(arguments[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


class _Failing:
    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self.calls = 0

    def score(self, samples: Sequence[Sample]) -> Scores:
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("the reward broke on sample toy/07")
        return self.reward.score(samples)


if __name__ == "__main__":
    main()
