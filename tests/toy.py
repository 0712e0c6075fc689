"""A world small enough that a whole run of staged PPO takes about a second: 8 px pictures, 2x2 codes.

Load it with `runpy.run_path`, since the tests are no package; under `tests/unirl` it is the fixture `toy`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from transformers.models.janus.modeling_janus import JanusVQVAE

from storage import FeatureStore
from unirl.policies.image_tokenizer import ImageTokenizer, ImageTokenizerConfig, pixels_from_uint8
from unirl.policies.token_lm import PolicyConfig, TokenLM
from unirl.policies.vocabulary import JointVocabulary
from unirl.trainer.loop import Trainer
from unirl.trainer.prompts import all_prompts
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.stages import Lesson, ModalitySettings, RunSettings, Stage
from unirl.trainer.tensor_pieces import PieceReader, piece_of
from unirl.types import Direction, Prompt, Sample, Scores

SIDE = 8
NUM_CODES = 8
LENGTH = 4
"""Codes of a picture."""
SHADES = ("black", "dark", "light", "white")
CAPTIONS = tuple(f"{left} and {right}" for left in SHADES for right in SHADES)
NUM_ROWS = 32

STAGES = (
    Stage(
        name="text",
        direction="text",
        prompts="split = 'rl'",
        steps=3,
        prompts_per_step=4,
        group_size=2,
        max_words=3,
        warmup_steps=2,
        learning_rate=2e-3,
    ),
    Stage(
        name="image",
        direction="image",
        prompts="split = 'rl'",
        steps=3,
        prompts_per_step=4,
        group_size=2,
        max_words=3,
        warmup_steps=2,
        learning_rate=2e-3,
        replay_prompts=4,
    ),
)
MANY_THINGS = (
    Stage(
        name="again",
        direction="text",
        prompts="split = 'rl'",
        steps=4,
        prompts_per_step=4,
        group_size=2,
        max_words=3,
        warmup_steps=2,
        learning_rate=2e-3,
        algorithm="dapo",
        sampling_rounds=3,
        offline_prompts=4,
        importance="token",
        success_window=(0.01, 1.0),
        success_every=2,
        curriculum=(Lesson(from_step=3, prompts="true"),),
        reference_every=2,
    ),
    Stage(
        name="both",
        direction="both",
        prompts="split = 'rl'",
        steps=3,
        prompts_per_step=8,
        group_size=2,
        max_words=3,
        warmup_steps=2,
        learning_rate=2e-3,
        carry=("critic",),
        advantage_norm="modality",
        critic_warmup_steps=1,
        critic_warmup_from="data",
        entropy_target=50.0,
        image=ModalitySettings(loss_weight=0.5, kl_coef=0.3),
        kl_budget=100.0,
    ),
)
"""Everything that a stage can do beyond the plain steps of `STAGES`."""
SETTINGS = RunSettings(seed=3, micro_prompts=2, checkpoint_every=2, keep_checkpoints=2)


def picture(number: int) -> np.ndarray:
    """uint8 (8, 8, 3): the left half and the right half in the shades that caption `number` names."""
    left, right = divmod(number % len(CAPTIONS), len(SHADES))
    pixels = np.empty((SIDE, SIDE, 3), np.uint8)
    pixels[:, : SIDE // 2], pixels[:, SIDE // 2 :] = left * 80, right * 80
    pixels[0, 0] = number
    return pixels


def make_tokenizer(seed: int = 0) -> ImageTokenizer:
    """An untrained tokenizer. Its codes still tell pictures apart."""
    config = ImageTokenizerConfig(
        image_size=SIDE, num_codes=NUM_CODES, code_dim=4, fold=4, base_channels=32, num_res_blocks=1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ImageTokenizer(JanusVQVAE(config.janus()))


def make_vocabulary() -> JointVocabulary:
    return JointVocabulary.from_captions(CAPTIONS, num_codes=NUM_CODES, rows=2, columns=2)


def make_policy(seed: int = 0, **sizes: int) -> TokenLM:
    config = PolicyConfig(
        **{"width": 32, "num_layers": 2, "num_heads": 2, "mlp_width": 64, "max_length": 64} | sizes
    )
    return TokenLM.create(config, make_vocabulary(), seed=seed)


def make_served_policy() -> TokenLM:
    """One with heads that are wide enough for vLLM on a CPU."""
    return make_policy(width=64)


def make_store(path: Path, *, encoded: bool = True) -> FeatureStore:
    """32 pictures with captions; every fourth is held out for evaluation."""
    store = FeatureStore.create(path)
    with store.writer(message="toy") as writer:
        for number in range(NUM_ROWS):
            buffer = io.BytesIO()
            Image.fromarray(picture(number)).save(buffer, format="PNG")
            writer.add(
                f"toy/{number:02d}",
                blob=buffer.getvalue(),
                caption=CAPTIONS[number % len(CAPTIONS)],
                split="eval" if number % 4 == 0 else "rl",
            )
    if encoded:
        codes = make_tokenizer().encode(pixels_from_uint8(np.stack([picture(n) for n in range(NUM_ROWS)])))
        values = [(f"toy/{n:02d}", codes[n].numpy().astype(np.int16)) for n in range(NUM_ROWS)]
        store.refresh().add_column("image_codes", values, dtype="int16", shape=(LENGTH,))
    return store.refresh()


def make_prompts(direction: Direction, num: int = 4) -> list[Prompt]:
    """Prompts without a store; their words differ in number."""
    pictures = np.stack([picture(3 * n) for n in range(num)])
    codes = make_tokenizer().encode(pixels_from_uint8(pictures)).numpy()
    captions = [CAPTIONS[n] if n % 2 else SHADES[n % 4] for n in range(num)]
    return [
        Prompt(key=f"p{n}", direction=direction, caption=captions[n], codes=codes[n], image=pictures[n])
        for n in range(num)
    ]


class Likes:
    """A rule reward: bright pictures when the policy draws, words of the true caption when it writes.

    Every `unscored`-th sample of a call could not be scored.
    """

    def __init__(self, *, unscored: int = 0) -> None:
        self.unscored = unscored

    def score(self, samples: Sequence[Sample]) -> Scores:
        total = np.array([self._one(sample) for sample in samples], dtype=np.float64)
        if self.unscored:
            total[:: self.unscored] = np.nan
        return Scores(total=total, components={"likes": total.copy(), "constant": np.ones(len(samples))})

    @staticmethod
    def _one(sample: Sample) -> float:
        if sample.direction == "image":
            return float(sample.image.mean()) / 255
        words, true = sample.caption.split(), set(sample.target.split())
        return sum(word in true for word in words) / max(len(words), 1)


class Even:
    """A judge: accepts even pictures and captions of an even length; the number of letters tells nothing."""

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        return np.array([(int(s.image.sum()) + len(s.caption)) % 2 == 0 for s in samples], dtype=np.float64)


def make_trainer(run: Path, store: FeatureStore, **replaced: Any) -> Trainer:
    """A trainer of the toy world, or the rest of a run; any argument of `Trainer` can be replaced."""
    stages = replaced.pop("stages", STAGES)
    evaluation = store.select("split = 'eval'")
    arguments: dict[str, Any] = {
        "policy": make_policy(),
        "tokenizer": make_tokenizer(),
        "reward": Likes(),
        "judge": Even(),
        "prompts": {stage.name: store.select(stage.prompts) for stage in stages},
        "warm_up": store.select("split = 'rl'"),
        "evaluation_prompts": {
            direction: all_prompts(evaluation, direction, image_size=SIDE) for direction in ("text", "image")
        },
        "accelerator": Accelerator(cpu=True),
    }
    run.mkdir(parents=True, exist_ok=True)
    settings = replaced.pop("settings", SETTINGS)
    return Trainer(RunDirectory(run), stages, settings, **{**arguments, **replaced})


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` without what another start may change: times, memory, the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "memory/", "wall_s"))}
        for line in lines
    ]


def experience_of(run: Path) -> dict[str, dict[str, Any]]:
    """Rows of the experience store by key, tensors and the picture's hash included. NaN reads as None."""
    store = FeatureStore.open(run / "experience")
    view = store.select()
    table = view.to_arrow().drop_columns(["row"]).to_pylist()
    tensors = {name: store.tensor(name).gather(view.rows).tolist() for name in store.tensor_columns}
    rows = [row | {name: values[i] for name, values in tensors.items()} for i, row in enumerate(table)]
    plain = [{name: None if value != value else value for name, value in row.items()} for row in rows]
    found = {row["key"]: row for row in plain}
    if len(found) != len(rows):
        raise ValueError(f"{len(rows) - len(found)} keys stand twice in {store.path}")
    return found


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Policy and optimizer of the newest checkpoint, whole, whatever ranks held them."""
    newest = max((run / "checkpoints").glob("step-*"))
    found: dict[str, torch.Tensor] = {}
    for kind in ("policy", "optimizer"):
        with PieceReader(sorted(newest.glob(f"{kind}.*"))) as reader:
            for name, shape in reader.shapes.items():
                whole = torch.empty(shape, dtype=reader.dtypes[name])
                reader.fill(name, piece_of(whole, is_main=True))
                found[f"{kind}/{name}"] = whole
    return found
