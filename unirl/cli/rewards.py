"""`unirl reward`: reward models, trained from a store.

torch and transformers take seconds to import, so these commands import them when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from unirl.trainer.run_directory import new_directory

__all__ = ["COMMANDS"]


def train(
    store: Annotated[Path, typer.Argument(help="Folder of the store.")],
    out: Annotated[Path, typer.Option("--out", help="New folder for the model.")],
    where: Annotated[str, typer.Option("--where", help="SQL condition: rows to train on.")] = "true",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 400,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak, after a warm-up.")] = 5e-3,
    image_size: Annotated[int, typer.Option(min=8, help="Side to which pictures are scaled.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Decides every random number.")] = 0,
) -> None:
    """Train a yes/no reward: does this picture show this caption?"""
    from unirl.rewards import train_from_store

    with new_directory(out) as folder:
        report = train_from_store(
            store,
            folder,
            where=where,
            image_size=(image_size, image_size),
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            seed=seed,
        )
    typer.echo(f"{out}: {report.accuracy:.1%} right on pictures held out from training")


COMMANDS: Final[Mapping[str, Callable[..., None]]] = {"train": train}
