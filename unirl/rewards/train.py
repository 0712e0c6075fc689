"""Training of the yes/no reward model: does this picture show that caption?"""

from __future__ import annotations

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
from torch.nn.functional import cross_entropy

from unirl.algorithms import learning_rate_factor
from unirl.algorithms.muon import Muon
from unirl.errors import ConfigError
from unirl.rewards.pairs import ExampleMaker, LabelledPictures
from unirl.rewards.question import Question
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import VlmConfig, build_model, build_tokenizer
from unirl.rewards.vlm import VlmYesNo
from unirl.types import Sample

__all__ = ["RewardReport", "expected_calibration_error", "train_yes_no"]

logger = logging.getLogger("unirl.rewards")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """How well the trained model answers about pictures that it was not trained on."""

    num_held_out: int
    accuracy: float
    """Share of held-out questions with the reward on the right side of 0.5; NaN without held-out examples."""
    true_accuracy: float
    """The same over true captions only."""
    false_accuracy: float
    """The same over false captions only."""
    calibration_error: float
    """Expected calibration error over ten bins; true and false captions weigh the same."""
    mass: float
    """Mean probability of yes and no together."""
    loss: float
    """Mean training loss over the last tenth of the steps, nats."""
    steps: int
    num_parameters: int
    wall_s: float


def train_yes_no(
    examples: ExampleMaker,
    *,
    captions: Sequence[str],
    image_size: tuple[int, int],
    out_dir: str | Path,
    held_out: LabelledPictures | None = None,
    steps: int = 400,
    batch_size: int = 64,
    learning_rate: float = 5e-3,
    warmup_fraction: float = 0.05,
    weight_decay: float = 0.01,
    caption_weight: float = 1.0,
    max_grad_norm: float = 1.0,
    seed: int = 0,
    config: VlmConfig | None = None,
    progress: bool = True,
) -> RewardReport:
    """Train a toy Qwen2.5-VL to answer yes or no, and save it so that `VlmYesNo.load` reads it.

    loss = (mean over true + mean over false questions of -log p(right answer)) / 2
           + caption_weight * mean over true questions' words of -log p(word | picture, words before it)

    The second term reads the caption off the picture. It teaches the vision tower far more per picture than
    one bit does, and costs nothing: the same forward gives it.

    Args:
        examples: Makes a batch; called with `batch_size` and a generator that depends on seed and step only.
        captions: Every caption whose words the model must know, those of held-out pictures as well.
        image_size: Rows and columns of the pictures.
        out_dir: Directory for weights, configuration, tokenizer, picture processor and `reward.json`.
        held_out: Questions about unseen pictures for the report.
        batch_size: Questions in a step.
        learning_rate: Peak rate, after a linear warm-up and before a cosine decay to 0.
        seed: Of the weights at the start and of the examples. The global generators are not used.

    Raises:
        ConfigError: If `steps` is not positive.
    """
    if steps < 1:
        raise ConfigError(f"reward train: steps is {steps}, wanted 1 or more")
    started = time.monotonic()
    question = Question(image_size=image_size)
    tokenizer = build_tokenizer(question, captions)
    model = QuestionModel(
        build_model(config or VlmConfig(), tokenizer, question=question, seed=seed), tokenizer, question
    )
    model.normalize_like(examples(4 * batch_size, np.random.default_rng([seed, steps])).pictures)
    optimizers = _optimizers(model, learning_rate, weight_decay)
    warmup_steps = max(1, round(warmup_fraction * steps))
    losses = []
    console = Console(stderr=True)
    is_shown = progress and console.is_terminal
    model.model.train()
    for step in track(range(steps), "reward model", console=console, disable=not is_shown):
        factor = learning_rate_factor(step, warmup_steps=warmup_steps, total_steps=steps, decay="cosine")
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate * factor
        loss = question_loss(model, examples(batch_size, np.random.default_rng([seed, step])), caption_weight)
        model.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.model.parameters(), max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    model.model.eval()
    report = _report(model, held_out, losses, started)
    model.save(Path(out_dir))
    question.save(Path(out_dir), training={"seed": seed, "learning_rate": learning_rate, **asdict(report)})
    logger.info("reward model: accuracy %.3f on %d questions", report.accuracy, report.num_held_out)
    return report


def _optimizers(
    model: QuestionModel, learning_rate: float, weight_decay: float
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, which learns much faster here; AdamW for the rest."""
    network = model.model
    ends = (network.get_input_embeddings().weight, network.get_output_embeddings().weight)
    matrices = [
        weight
        for weight in network.parameters()
        if weight.ndim == 2 and all(weight is not end for end in ends)
    ]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in network.parameters() if id(weight) not in inside]
    return (
        Muon(matrices, learning_rate=learning_rate, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=weight_decay),
    )


def question_loss(model: QuestionModel, batch: LabelledPictures, caption_weight: float) -> Tensor:
    """Return the loss that `train_yes_no` describes, float32 scalar with gradient."""
    ids, mask = model.pad(model.tokenize(batch.captions))
    features = model.look(batch.pictures)[torch.from_numpy(batch.index)]
    labels = torch.from_numpy(batch.labels)
    logits = model.logits(features, ids, mask, keep=0)
    answers = torch.where(labels, *model.answers)
    per_answer = cross_entropy(logits[:, -1], answers, reduction="none")
    loss = torch.stack([per_answer[part].mean() for part in (labels, ~labels) if bool(part.any())]).mean()
    words = mask & (mask.cumsum(1) > model.num_before) & labels[:, None]
    words[:, ids.shape[1] - model.num_after + 1 :] = False  # one token after the caption says where it ends
    return loss + caption_weight * cross_entropy(logits[:, :-1][words[:, 1:]], ids[:, 1:][words[:, 1:]])


def expected_calibration_error(
    probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray, num_bins: int = 10
) -> float:
    """Mean gap between what was predicted and what was true, over bins of equal width.

    ECE = sum over bins of (weight in bin / all weight) * |mean label - mean probability|.

    Args:
        probabilities: Float (B,) in [0, 1].
        labels: Bool (B,).
        weights: Float (B,), of each question.

    Source: Guo et al. 2017, On Calibration of Modern Neural Networks, equation 3.
    """
    bins = np.minimum((probabilities * num_bins).astype(int), num_bins - 1)
    gaps = np.bincount(bins, weights * (labels - probabilities), minlength=num_bins)
    return float(np.abs(gaps).sum() / weights.sum())


def _as_samples(examples: LabelledPictures) -> list[Sample]:
    return [
        Sample(
            key=f"held-out {row}",
            direction="image",
            caption=caption,
            image=examples.pictures[index],
            target=caption,
        )
        for row, (index, caption) in enumerate(zip(examples.index, examples.captions))
    ]


def _report(
    model: QuestionModel, held_out: LabelledPictures | None, losses: Sequence[float], started: float
) -> RewardReport:
    accuracy = true_accuracy = false_accuracy = calibration_error = mass = float("nan")
    num_held_out = 0
    if held_out is not None:
        num_held_out = len(held_out.labels)
        scores = VlmYesNo(model.backend(), model.question, max_failed_fraction=0.0).score(
            _as_samples(held_out)
        )
        labels, probabilities = held_out.labels, scores.total
        right = (probabilities > 0.5) == labels
        accuracy, mass = float(right.mean()), float(scores.components["vlm_mass"].mean())
        true_accuracy, false_accuracy = float(right[labels].mean()), float(right[~labels].mean())
        weights = np.where(labels, 0.5 / labels.sum(), 0.5 / (~labels).sum())
        calibration_error = expected_calibration_error(probabilities, labels, weights)
    return RewardReport(
        num_held_out=num_held_out,
        accuracy=accuracy,
        true_accuracy=true_accuracy,
        false_accuracy=false_accuracy,
        calibration_error=calibration_error,
        mass=mass,
        loss=float(np.mean(losses[-max(1, len(losses) // 10) :])),
        steps=len(losses),
        num_parameters=sum(parameter.numel() for parameter in model.model.parameters()),
        wall_s=time.monotonic() - started,
    )
