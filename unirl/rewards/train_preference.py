"""Training of the preference reward on pairs, with the loss of Bradley and Terry."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from unirl.algorithms import learning_rate_factor
from unirl.errors import ConfigError
from unirl.rewards.pictures import fit_picture
from unirl.rewards.preference import HEAD_FILE, PreferenceModel
from unirl.rewards.preference_pairs import PreferencePair
from unirl.rewards.question import REWARD_FILE, Question
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import VlmConfig, build_model, build_tokenizer
from unirl.rewards.train import expected_calibration_error

__all__ = ["PreferenceReport", "reward_version", "split_pairs", "train_preference"]

logger = logging.getLogger("unirl.rewards")

WANTED = {"first": 1.0, "second": 0.0, "tie": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceReport:
    """How well the trained model tells which sample of a held-out prompt is preferred."""

    version: int
    """1 for a new model, one more than the model that it was trained from."""
    num_pairs: int
    """Labelled pairs that were trained on."""
    num_held_out: int
    accuracy: float
    """Share of held-out pairs, ties aside, in which the preferred sample scores higher; NaN without any."""
    calibration_error: float
    """Expected calibration error, over ten bins, of sigmoid(score of first - score of second)."""
    loss: float
    """Mean training loss over the last tenth of the steps, nats."""
    steps: int
    wall_s: float


def train_preference(
    pairs: Sequence[PreferencePair],
    out_dir: str | Path,
    *,
    start: str | Path | None = None,
    image_size: tuple[int, int] = (32, 32),
    held_out_fraction: float = 0.2,
    steps: int = 200,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
    seed: int = 0,
    config: VlmConfig | None = None,
    progress: bool = True,
) -> PreferenceReport:
    """Train a preference reward and save it so that `Preference.load` reads it.

    loss = mean over pairs of -[y log sigmoid(s1 - s2) + (1 - y) log sigmoid(s2 - s1)],
    with y = 1 where the first is preferred, 0 where the second is, 1/2 for a tie.

    Args:
        pairs: Those without a label are left out.
        out_dir: Directory for weights, head, tokenizer, picture processor and `reward.json`.
        start: A reward model to go on from: a preference reward, whose next version this becomes, or a yes/no
            reward, whose weights it starts with. None makes a toy model from the words of the pairs.
        image_size: Rows and columns of the pictures of a new toy model.
        held_out_fraction: Share of the prompts whose pairs are not trained on and give the report.
        learning_rate: Peak rate, after a warm-up and before a cosine decay to 0.
        seed: Of the split, the order of pairs, and the weights of what is new.

    Raises:
        ConfigError: If there are no labelled pairs to train on or to hold out, or `steps` is not positive.

    Source: Bradley and Terry 1952; Ouyang et al. 2022 (arXiv 2203.02155), equation 1.
    """
    if steps < 1:
        raise ConfigError(f"reward train: steps is {steps}, wanted 1 or more")
    started = time.monotonic()
    trained, held_out = split_pairs(pairs, held_out_fraction=held_out_fraction, seed=seed)
    model = _model(start, pairs, image_size, seed, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=weight_decay)
    losses = []
    console = Console(stderr=True)
    is_shown = progress and console.is_terminal
    model.train()
    for step in track(range(steps), "preference reward", console=console, disable=not is_shown):
        generator = np.random.default_rng([seed, step])
        batch = [trained[row] for row in generator.integers(len(trained), size=batch_size)]
        factor = learning_rate_factor(
            step, warmup_steps=max(1, steps // 20), total_steps=steps, decay="cosine"
        )
        for group in optimizer.param_groups:
            group["lr"] = factor * learning_rate
        margins = _margins(model, batch)
        wanted = torch.tensor([WANTED[str(pair.label)] for pair in batch])
        loss = binary_cross_entropy_with_logits(margins, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    accuracy, calibration_error = _measure(model, held_out, batch_size)
    report = PreferenceReport(
        version=1 if start is None else reward_version(start) + 1,
        num_pairs=len(trained),
        num_held_out=len(held_out),
        accuracy=accuracy,
        calibration_error=calibration_error,
        loss=float(np.mean(losses[-max(1, len(losses) // 10) :])),
        steps=steps,
        wall_s=time.monotonic() - started,
    )
    model.save(Path(out_dir))
    training = {"seed": seed, "start": None if start is None else str(start), **asdict(report)}
    model.trunk.question.save(Path(out_dir), training=training)
    logger.info("preference reward: accuracy %.3f on %d pairs", report.accuracy, report.num_held_out)
    return report


def reward_version(directory: str | Path) -> int:
    """Version of a reward model: 1 unless it was trained from the pairs of another's mistakes.

    Raises:
        ConfigError: If the directory holds no reward model.
    """
    Question.load(Path(directory))
    document = json.loads((Path(directory) / REWARD_FILE).read_text(encoding="utf-8"))
    return int(document["training"].get("version", 1))


def split_pairs(
    pairs: Sequence[PreferencePair], *, held_out_fraction: float, seed: int
) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """Labelled pairs to train on and to hold out; all pairs of a prompt stay on one side.

    Raises:
        ConfigError: If one of the two is empty.
    """
    labelled = [pair for pair in pairs if pair.label is not None]
    prompts = sorted(
        {pair.prompt for pair in labelled},
        key=lambda prompt: hashlib.blake2b(f"{seed} {prompt}".encode()).digest(),
    )
    unseen = set(prompts[: round(held_out_fraction * len(prompts))])
    trained = [pair for pair in labelled if pair.prompt not in unseen]
    held_out = [pair for pair in labelled if pair.prompt in unseen]
    if not trained or not held_out:
        raise ConfigError(
            f"{len(pairs)} pairs, {len(labelled)} of them labelled, of {len(prompts)} prompts: "
            f"{len(trained)} to train on and {len(held_out)} held out; label more or hold out another share"
        )
    return trained, held_out


def _model(
    start: str | Path | None,
    pairs: Sequence[PreferencePair],
    image_size: tuple[int, int],
    seed: int,
    config: VlmConfig | None,
) -> PreferenceModel:
    if start is not None:
        if (Path(start) / HEAD_FILE).is_file():
            return PreferenceModel.load(start)
        return PreferenceModel(QuestionModel.load(start), seed=seed)
    question = Question(image_size=image_size)
    captions = [sample.caption for pair in pairs for sample in (pair.first, pair.second)]
    tokenizer = build_tokenizer(question, captions)
    network = build_model(config or VlmConfig(), tokenizer, question=question, seed=seed)
    trunk = QuestionModel(network, tokenizer, question)
    trunk.normalize_like(_pictures(trunk, pairs))
    return PreferenceModel(trunk, seed=seed)


def _pictures(trunk: QuestionModel, pairs: Sequence[PreferencePair]) -> np.ndarray:
    size = trunk.question.image_size
    return np.stack(
        [fit_picture(sample.image, size) for pair in pairs for sample in (pair.first, pair.second)]
    )


def _margins(model: PreferenceModel, pairs: Sequence[PreferencePair]) -> Tensor:
    """Score of the first minus that of the second, float32 (B,), with gradient."""
    captions = [sample.caption for pair in pairs for sample in (pair.first, pair.second)]
    scores = model(_pictures(model.trunk, pairs), np.arange(len(captions)), captions)
    differences: Tensor = scores[::2] - scores[1::2]
    return differences


@torch.inference_mode()
def _measure(model: PreferenceModel, pairs: Sequence[PreferencePair], batch_size: int) -> tuple[float, float]:
    """Accuracy and calibration error over the pairs that have a preference."""
    decided = [pair for pair in pairs if pair.label != "tie"]
    if not decided:
        return float("nan"), float("nan")
    margins = torch.cat(
        [_margins(model, decided[start : start + batch_size]) for start in range(0, len(decided), batch_size)]
    )
    first = np.array([pair.label == "first" for pair in decided])
    probabilities = torch.sigmoid(margins.double()).numpy()
    accuracy = float(((probabilities > 0.5) == first).mean())
    return accuracy, expected_calibration_error(probabilities, first, np.ones(len(decided)))
