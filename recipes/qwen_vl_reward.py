"""A Qwen2.5-VL as reward: trained on captioned pictures and on preferences, served, and asked for scores.

    python -m recipes.qwen_vl_reward --store data/store --pairs data/pairs --out models/qwen_vl_reward
    python -m recipes.qwen_vl_reward --tiny --out runs/qwen_vl_reward

Three steps; a model that is there is not trained again.

1. `yes_no`: does this picture show this caption? Learnt from captions (`unirl reward train STORE`).
2. `preference`: which of two samples is better? A head on these weights, or on those of `--start`, learnt
   from labelled pairs (`unirl reward train --pairs`).
3. The yes/no model is served (`unirl reward serve`) and scores pictures through its address, as a trainer on
   another machine would; the scores must be those of the model in this process.

A preference head is no chat model: no server offers it, and trainers load it (`scoring.preference`). The
models are of toy size, unless `--start` names a reward of your own, in the form of transformers with a
`reward.json`. Needs, for a start of 7B, a GPU of 80 GB for training and one for serving, and hours. It was
not run at that size. Tests run `--tiny` on a CPU.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import uvicorn

from datapipe import ingest
from recipes.worlds.shapes import write_shapes
from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.rewards import (
    Preference,
    PreferencePair,
    VlmConfig,
    VlmYesNo,
    read_pairs,
    train_from_store,
    train_preference,
)
from unirl.rewards.backends.endpoint import EndpointBackend
from unirl.rewards.backends.qwen import TransformersBackend
from unirl.rewards.backends.server import ServedBackend, make_app
from unirl.rewards.from_store import pictures_of
from unirl.rewards.preference_pairs import Label
from unirl.trainer.run_directory import new_directory, write_json
from unirl.types import Sample

__all__ = ["QwenReward", "qwen_vl_reward", "serve_reward"]

log = logging.getLogger("unirl.recipes.qwen_vl_reward")

TINY = VlmConfig(width=64, num_layers=1, vision_width=32, vision_layers=1, mlp_width=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenReward:
    """What the models reached."""

    served_gap: float
    """Largest difference between a served score and that of the same model in this process."""
    yes_no_mean: float
    """Mean probability of yes for true captions."""
    preference_accuracy: float
    """Share of all labelled pairs, ties aside, whose preferred sample scores higher."""
    num_scored: int


def qwen_vl_reward(
    out: Path,
    *,
    store: Path,
    pairs: Sequence[PreferencePair],
    start: Path | None = None,
    where: str = "true",
    image_size: tuple[int, int] = (32, 32),
    steps: int = 400,
    batch_size: int = 64,
    learning_rate: float = 5e-3,
    pair_steps: int = 200,
    pair_batch_size: int = 32,
    pair_learning_rate: float = 1e-3,
    held_out_fraction: float = 0.2,
    num_scored: int = 64,
    config: VlmConfig | None = None,
    host: str = "127.0.0.1",
    max_batch: int = 64,
    concurrency: int = 32,
    seed: int = 0,
) -> QwenReward:
    """Train both rewards, serve one of them, and score pictures with both.

    Args:
        out: Gets the folders `yes_no` and `preference`, and `report.json`.
        store: Captioned pictures.
        pairs: Labelled pairs.
        start: Reward model that the preference starts from; None takes the yes/no model of step 1.
        where: SQL condition: rows to train the yes/no model on, and to score.
        image_size: Rows and columns that pictures are scaled to.
        steps, batch_size, learning_rate: Of the yes/no model.
        pair_steps, pair_batch_size, pair_learning_rate: Of the preference.
        held_out_fraction: Share of the prompts whose pairs are not trained on.
        num_scored: Pictures that are scored through the server, at most.
        config: Size of the yes/no model.
        host: Address to serve on.
        max_batch: Requests that the server answers together.
        concurrency: Requests in flight at a time.
        seed: Decides every random number.
    """
    yes_no, preference = out / "yes_no", out / "preference"
    if not yes_no.is_dir():
        with new_directory(yes_no) as folder:
            train_from_store(
                store,
                folder,
                where=where,
                image_size=image_size,
                steps=steps,
                batch_size=batch_size,
                learning_rate=learning_rate,
                seed=seed,
                config=config,
            )
    if not preference.is_dir():
        with new_directory(preference) as folder:
            train_preference(
                pairs,
                folder,
                start=start or yes_no,
                held_out_fraction=held_out_fraction,
                steps=pair_steps,
                batch_size=pair_batch_size,
                learning_rate=pair_learning_rate,
                seed=seed,
            )
    samples = _samples(store, where, image_size, num_scored)
    local = VlmYesNo.load(yes_no)
    token = secrets.token_urlsafe(24)
    with serve_reward(TransformersBackend.load(yes_no), token=token, host=host, max_batch=max_batch) as url:
        served = VlmYesNo(EndpointBackend([url], token=token, concurrency=concurrency), local.question)
        scores = served.score(samples).total
    report = QwenReward(
        served_gap=float(np.abs(scores - local.score(samples).total).max()),
        yes_no_mean=float(scores.mean()),
        preference_accuracy=_accuracy(Preference.load(preference), pairs),
        num_scored=len(samples),
    )
    write_json(out / "report.json", asdict(report))
    log.info("served scores differ by %.2g from those in this process", report.served_gap)
    return report


@contextmanager
def serve_reward(backend: ServedBackend, *, token: str, host: str, max_batch: int) -> Iterator[str]:
    """Serve a yes/no reward's model in a thread, as `unirl reward serve` does in a process; gives its URL."""
    app = make_app(backend, name="qwen_vl_reward", token=token, max_batch=max_batch)
    config = uvicorn.Config(app, host=host, port=0, log_level="warning")
    listening = config.bind_socket()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{listening.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


def _samples(store: Path, where: str, size: tuple[int, int], count: int) -> list[Sample]:
    view = FeatureStore.open(store).select(f"({where}) AND caption <> '' AND bytes IS NOT NULL")[:count]
    pictures, captions = pictures_of(view, size), view.column("caption").to_pylist()
    return [
        Sample(key=key, direction="image", caption=caption, image=picture, target=caption)
        for key, caption, picture in zip(view.column("key").to_pylist(), captions, pictures, strict=True)
    ]


def _accuracy(reward: Preference, pairs: Sequence[PreferencePair]) -> float:
    labelled = [pair for pair in pairs if pair.label in ("first", "second")]
    first = reward.score([pair.first for pair in labelled]).total
    second = reward.score([pair.second for pair in labelled]).total
    wanted = np.array([pair.label == "first" for pair in labelled])
    return float(((first > second) == wanted).mean())


def _tiny_data(folder: Path, seed: int) -> tuple[Path, list[PreferencePair]]:
    """A store of 40 made pictures, and pairs in which the picture that shows the caption is preferred."""
    files = write_shapes(folder / "files", seed=seed, num_sft=40, num_rl=4, num_eval=4)
    ingest(files.sft, folder / "store")
    samples = _samples(folder / "store", "true", (32, 32), 40)
    pairs = []
    for number, (right, other) in enumerate(pairwise(samples)):
        wrong = Sample(
            key=right.key, direction="image", caption=right.caption, image=other.image, target=right.target
        )
        first, second = (right, wrong) if number % 2 else (wrong, right)
        label: Label = "first" if number % 2 else "second"
        pairs.append(PreferencePair(pair=f"p{number}", first=first, second=second, label=label))
    return folder / "store", pairs


def main(
    out: Annotated[Path, typer.Option(help="New folder for the models and the report.")],
    store: Annotated[Path | None, typer.Option(help="Store of captioned pictures.")] = None,
    pairs: Annotated[Path | None, typer.Option(help="Labelled pairs: file, folder or store.")] = None,
    start: Annotated[Path | None, typer.Option(help="Reward model to start the preference from.")] = None,
    where: Annotated[str, typer.Option(help="SQL condition: rows to train on.")] = "true",
    side: Annotated[int, typer.Option(min=8, help="Side that pictures are scaled to.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the yes/no model.")] = 400,
    pair_steps: Annotated[int, typer.Option(min=1, help="Steps of the preference.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Decides every random number.")] = 0,
    tiny: Annotated[bool, typer.Option("--tiny", help="A few steps on made pictures, for a CPU.")] = False,
) -> None:
    """Train a yes/no and a preference reward, serve the first, and score with both."""
    if tiny:
        made, known = _tiny_data(out / "data", seed)
        report = qwen_vl_reward(
            out,
            store=made,
            pairs=known,
            steps=2,
            batch_size=8,
            pair_steps=2,
            num_scored=8,
            config=TINY,
            seed=seed,
        )
    elif store is None or pairs is None:
        raise ConfigError("qwen_vl_reward: name --store and --pairs, or try it with --tiny")
    else:
        report = qwen_vl_reward(
            out,
            store=store,
            pairs=read_pairs(pairs),
            start=start,
            where=where,
            image_size=(side, side),
            steps=steps,
            pair_steps=pair_steps,
            seed=seed,
        )
    typer.echo(
        f"{out}: served scores differ by {report.served_gap:.1e}, true captions get "
        f"{report.yes_no_mean:.1%} yes, {report.preference_accuracy:.1%} of the pairs are right"
    )


if __name__ == "__main__":
    typer.run(main)
