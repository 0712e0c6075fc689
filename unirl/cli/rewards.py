"""`unirl reward`: reward models, trained from a store or from pairs, and the pairs to make them better.

torch and transformers take seconds to import, so these commands import them when they run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from unirl.cli.output import AsJson, counted, require_http, tell
from unirl.cli.reward_server import TOKEN_HELP, token_of
from unirl.errors import ConfigError
from unirl.trainer.run_directory import new_directory

__all__ = ["COMMANDS"]

STEPS, LEARNING_RATE, BATCH_SIZE = 400, 5e-3, 64
PAIR_STEPS, PAIR_LEARNING_RATE, PAIR_BATCH_SIZE = 200, 1e-3, 32

PairsPath = Annotated[Path, typer.Argument(help="pairs.jsonl, or the folder that holds it.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides every random number.")]


def train(
    out: Annotated[Path, typer.Option("--out", help="New folder for the model.")],
    store: Annotated[Path | None, typer.Argument(help="Folder of the store, for a yes/no reward.")] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(help="Labelled pairs for a preference reward: file, folder or store."),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="File with the labels of the pairs.")] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Reward model to go on from; with --pairs.")
    ] = None,
    where: Annotated[str, typer.Option("--where", help="SQL condition: rows to train on.")] = "true",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Questions or pairs in a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0.0, help="Peak, after a warm-up.")] = None,
    image_size: Annotated[int, typer.Option(min=8, help="Side to which pictures are scaled.")] = 32,
    for_vllm: Annotated[
        bool, typer.Option("--for-vllm", help="Give a yes/no reward heads that vLLM on a CPU can run.")
    ] = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train a yes/no reward (does this picture show this caption?), or with --pairs a preference reward.

    Example: unirl reward train data/store --out models/reward --where "split = 'train'"
    Example: unirl reward train --pairs labelled --from models/reward --out models/reward-2
    """
    if (store is None) == (pairs is None):
        raise typer.BadParameter("name a store, for a yes/no reward, or --pairs, for a preference")
    if pairs is None and (labels is not None or start is not None):
        raise typer.BadParameter("--labels and --from belong to --pairs")
    if pairs is not None and for_vllm:
        raise typer.BadParameter("--for-vllm is for a yes/no reward, and --pairs trains a preference")
    from unirl.rewards import VLLM_TOY, VlmConfig, read_pairs, train_from_store, train_preference

    size = (image_size, image_size)
    if store is not None:
        with new_directory(out) as folder:
            report = train_from_store(
                store,
                folder,
                where=where,
                image_size=size,
                steps=steps or STEPS,
                batch_size=batch_size or BATCH_SIZE,
                learning_rate=LEARNING_RATE if learning_rate is None else learning_rate,
                seed=seed,
                config=VLLM_TOY if for_vllm else VlmConfig(),
            )
        text = f"{out}: {report.accuracy:.1%} right on pictures held out from training"
        tell({"model": str(out), **asdict(report)}, text, as_json)
    elif pairs is not None:
        found = read_pairs(pairs, labels=labels, where=where)
        with new_directory(out) as folder:
            preference = train_preference(
                found,
                folder,
                start=start,
                image_size=size,
                steps=steps or PAIR_STEPS,
                batch_size=batch_size or PAIR_BATCH_SIZE,
                learning_rate=PAIR_LEARNING_RATE if learning_rate is None else learning_rate,
                seed=seed,
            )
        text = (
            f"{out}: version {preference.version}, {preference.accuracy:.1%} right on "
            f"{preference.num_held_out} pairs held out from training, "
            f"calibration error {preference.calibration_error:.3f}"
        )
        tell({"model": str(out), **asdict(preference)}, text, as_json)


def mine(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or its experience store.")],
    out: Annotated[Path, typer.Option("--out", help="New folder for pairs.jsonl and the pictures.")],
    by: Annotated[
        Literal["group", "uncertainty", "components", "judge"],
        typer.Option(help="What makes a pair worth a label."),
    ] = "group",
    count: Annotated[int, typer.Option(min=1, help="Pairs to pick, at most.")] = 100,
    where: Annotated[str, typer.Option("--where", help="SQL condition over the experience.")] = "true",
    as_json: AsJson = False,
) -> None:
    """Pick pairs of a run's samples that people, or a stronger model, should label.

    Example: unirl reward mine runs/demo --out pairs --by components --count 200
    """
    from unirl.rewards import mine_pairs, write_pairs

    if not run.is_dir():
        raise ConfigError(f"{run}: no such run directory; `runs/NAME` is made when a recipe starts")
    found = mine_pairs(run, strategy=by, num_pairs=count, where=where)
    if not found:
        raise ConfigError(f"{run}: no pairs by {by!r} where {where}; try another --by or condition")
    with new_directory(out) as folder:
        write_pairs(found, folder)
    text = (
        f'{out / "pairs.jsonl"}: {counted(len(found), "pair")}; set "label" to "first", "second" or "tie", '
        f"or run `unirl reward label {out}`"
    )
    tell({"pairs": str(out / "pairs.jsonl"), "num_pairs": len(found), "by": by}, text, as_json)


def label(
    pairs: PairsPath,
    out: Annotated[Path, typer.Option("--out", help="New folder for the labelled pairs.")],
    model: Annotated[Path | None, typer.Option(help="Folder of a reward model that labels.")] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="URL of a stronger model's server, up to /v1. May be repeated.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help=TOKEN_HELP)] = None,
    question: Annotated[
        Path | None,
        typer.Option(help="Folder whose reward.json says what to ask; with --endpoint."),
    ] = None,
    margin: Annotated[float, typer.Option(min=0.0, help="Scores nearer than this are a tie.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Let a stronger model label pairs: it scores both, and the higher score wins.

    Example: unirl reward label pairs --endpoint http://127.0.0.1:8000/v1 --out labelled
    """
    if (model is None) == (not endpoint):
        raise typer.BadParameter("name one of --model and --endpoint")
    require_http(endpoint or [])
    if model is not None and question is not None:
        raise typer.BadParameter("--question belongs to --endpoint; a model of --model has its own")
    from unirl.rewards import Question, VlmYesNo, label_pairs, load_reward, read_pairs, write_pairs
    from unirl.types import Reward

    reward: Reward
    if model is not None:
        reward = load_reward(model)
    else:
        from unirl.rewards.backends.endpoint import EndpointBackend

        asked = Question(image_size=(448, 448)) if question is None else Question.load(question)
        reward = VlmYesNo(EndpointBackend(endpoint or [], token=token_of(token_file)), asked)
    labelled = label_pairs(read_pairs(pairs), reward, margin=margin)
    with new_directory(out) as folder:
        write_pairs(labelled, folder)
    counts = Counter(str(pair.label) for pair in labelled)
    text = f"{out}: " + ", ".join(f"{counts[name]} {name}" for name in sorted(counts))
    tell({"pairs": str(out / "pairs.jsonl"), "labels": dict(sorted(counts.items()))}, text, as_json)


COMMANDS: Final[Mapping[str, Callable[..., None]]] = {"train": train, "mine": mine, "label": label}
