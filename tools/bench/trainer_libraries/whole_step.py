"""A trainer of this project on a store of its own, with a clock on everything that is not orchestration."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn

from storage import FeatureStore
from tools.bench.trainer_libraries.rows import CLIP, GROUP, LEARNING_RATE, MAX_GRAD_NORM, NUM_ROWS
from unirl.policies.image_tokenizer import ImageTokenizer, ImageTokenizerConfig
from unirl.policies.token_lm import TokenLM
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.trainer.alarms import AlarmSettings
from unirl.trainer.loop import Trainer
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.stages import RunSettings, Stage
from unirl.types import Rollout, Sample, Scores

from transformers.models.janus.modeling_janus import JanusVQVAE  # isort: skip  after unirl

__all__ = ["Clock", "make_trainer"]

SIDE, NUM_PROMPTS = 8, 64


class Clock:
    """Seconds by name; a part inside another counts for the outer one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[tuple[str, float]] = []

    def start(self, name: str) -> None:
        """Begin a part."""
        self._running.append((name, time.perf_counter()))

    def stop(self) -> None:
        """End the part that began last."""
        name, started = self._running.pop()
        if not self._running:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """A part as a block."""
        self.start(name)
        try:
            yield
        finally:
            self.stop()

    def watch(self, model: nn.Module) -> None:
        """Count the forward passes of a model."""
        model.register_forward_pre_hook(lambda *_: self.start("forward"))
        model.register_forward_hook(lambda *_: self.stop())


class TimedAccelerator(Accelerator):
    """Counts backward passes and the norm of the gradient."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(cpu=True)
        self._clock = clock

    def backward(self, loss: Tensor, **options: Any) -> None:
        with self._clock.on("backward"):
            super().backward(loss, **options)

    def clip_grad_norm_(self, *arguments: Any, **options: Any) -> Any:
        with self._clock.on("optimizer"):
            return super().clip_grad_norm_(*arguments, **options)


class TimedEngine(NativeEngine):
    """Counts generation."""

    clock: Clock

    def sync(self, policy: Any, version: int) -> None:
        with self.clock.on("generation"):
            super().sync(policy, version)

    def rollout(self, request: RolloutRequest) -> Rollout:
        with self.clock.on("generation"):
            return super().rollout(request)


class VariedWords:
    """A reward, and a judge that is never asked: the share of a text's words that are different ones."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def score(self, samples: Sequence[Sample]) -> Scores:
        with self._clock.on("scoring"):
            words = [sample.caption.split() for sample in samples]
            return Scores(total=np.array([len(set(w)) / max(len(w), 1) for w in words]))

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        return np.zeros(len(samples))


def make_trainer(data: Path, folder: Path, clock: Clock, *, response_length: int) -> tuple[Trainer, Stage]:
    """A trainer whose every step writes NUM_ROWS texts of `response_length` tokens and learns from them."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    policy = TokenLM.load(data / "model")
    policy.masks_text[:, policy.vocabulary.eos] = False
    stage = Stage(
        name="text",
        direction="text",
        prompts="true",
        steps=1_000_000,
        prompts_per_step=NUM_ROWS // GROUP,
        group_size=GROUP,
        max_words=response_length - 1,
        learning_rate=LEARNING_RATE,
        warmup_steps=0,
        max_grad_norm=MAX_GRAD_NORM,
        updates_per_step=1,
        algorithm="grpo",
        clip_low=CLIP,
        clip_high=CLIP,
        kl_coef=0.0,
        kl_in="reward",
    )
    engine, words = TimedEngine(policy), VariedWords(clock)
    engine.clock = clock
    trainer = Trainer(
        RunDirectory(folder / "run"),
        (stage,),
        RunSettings(micro_prompts=NUM_ROWS // GROUP, alarms=AlarmSettings(kl=None)),
        policy=policy,
        tokenizer=_tokenizer(),
        reward=words,
        judge=words,
        prompts={stage.name: _store(folder / "run" / "store", policy).select("true")},
        evaluation_prompts={},
        accelerator=TimedAccelerator(clock),
        engine=engine,
    )
    clock.watch(policy)
    clock.watch(trainer.reference)
    trainer.optimizer.optimizer.register_step_pre_hook(lambda *_: clock.start("optimizer"))
    trainer.optimizer.optimizer.register_step_post_hook(lambda *_: clock.stop())
    return trainer, stage


def _store(path: Path, policy: TokenLM) -> FeatureStore:
    """Small grey pictures with random codes."""
    buffer = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (128, 128, 128)).save(buffer, format="PNG")
    keys = [f"p{i:02d}" for i in range(NUM_PROMPTS)]
    grid = policy.vocabulary.grid
    codes = np.random.default_rng(0).integers(0, grid.num_codes, (NUM_PROMPTS, grid.length)).astype(np.int16)
    store = FeatureStore.create(path)
    with store.writer(message="prompts") as writer:
        for key in keys:
            writer.add(key, blob=buffer.getvalue(), caption="word000")
    store = store.refresh()
    store.add_column("image_codes", list(zip(keys, codes)), dtype="int16", shape=(grid.length,))
    return store.refresh()


def _tokenizer() -> ImageTokenizer:
    """Untrained: this stage draws nothing, the trainer only asks it for the size of pictures."""
    config = ImageTokenizerConfig(image_size=SIDE, num_codes=8, code_dim=4, fold=4, base_channels=32)
    return ImageTokenizer(JanusVQVAE(config.janus()))
