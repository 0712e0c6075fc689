"""`unirl tokenizer` and `unirl sft`: models trained from a store.

torch and transformers take seconds to import, so these commands import them when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from unirl.cli.output import AsJson, tell
from unirl.trainer.run_directory import new_directory

__all__ = ["TOKENIZER_COMMANDS", "encode", "sft", "train_tokenizer"]

StorePath = Annotated[Path, typer.Argument(help="Folder of the store.")]
OutPath = Annotated[Path, typer.Option("--out", help="New folder for the model.")]
Where = Annotated[str, typer.Option("--where", help="SQL condition: rows to train on.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides every random number.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps.")]
BatchSize = Annotated[int, typer.Option(min=1)]
LearningRate = Annotated[float, typer.Option(min=0.0, help="Peak, after a warm-up.")]
TokenizerPath = Annotated[Path, typer.Option("--tokenizer", help="Folder of the image tokenizer.")]


def train_tokenizer(
    store: StorePath,
    out: OutPath,
    where: Where = "true",
    steps: Steps = 300,
    batch_size: BatchSize = 32,
    learning_rate: LearningRate = 3e-3,
    image_size: Annotated[int, typer.Option(min=8, help="Side of the square picture, pixels.")] = 32,
    num_codes: Annotated[int, typer.Option(min=2, help="Size of the codebook.")] = 128,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train an image tokenizer on the pictures of a store.

    Example: unirl tokenizer train data/store --out models/tokenizer --image-size 64 --steps 2000
    """
    from unirl.policies.image_tokenizer import ImageTokenizerConfig
    from unirl.trainer import model_training
    from unirl.trainer.recipe import TokenizerTraining

    training = TokenizerTraining(
        config=ImageTokenizerConfig(image_size=image_size, num_codes=num_codes),
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
    )
    with new_directory(out) as folder:
        report = model_training.train_tokenizer(store, folder, where=where, training=training, seed=seed)
    text = (
        f"{out}: mean squared error {report.mean_squared_error:.4f}, "
        f"{report.codes_used} of {report.num_codes} codes used"
    )
    tell({"model": str(out), **asdict(report)}, text, as_json)


def encode(store: StorePath, tokenizer: TokenizerPath, as_json: AsJson = False) -> None:
    """Add the image codes of every picture to the store, as a tensor column.

    Example: unirl tokenizer encode data/store --tokenizer models/tokenizer
    """
    from storage import FeatureStore
    from unirl.policies.image_tokenizer import ImageTokenizer
    from unirl.trainer import model_training
    from unirl.trainer.prompts import CODES_COLUMN

    model_training.encode_pictures(store, ImageTokenizer.load(tokenizer))
    facts = {
        "store": str(store),
        "column": CODES_COLUMN,
        "num_rows": len(FeatureStore.open(store).tensor(CODES_COLUMN).present()),
    }
    tell(facts, f"{store}: column {CODES_COLUMN} is complete", as_json)


def sft(
    store: StorePath,
    tokenizer: TokenizerPath,
    out: OutPath,
    where: Where = "true",
    steps: Steps = 400,
    batch_size: BatchSize = 64,
    learning_rate: LearningRate = 5e-3,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Warm a small policy up on pictures with captions, in both directions.

    Example: unirl sft data/store --tokenizer models/tokenizer --out models/policy --where "split = 'train'"
    """
    from storage import FeatureStore
    from unirl.policies.image_tokenizer import ImageTokenizer
    from unirl.trainer import model_training
    from unirl.trainer.recipe import SupervisedTraining

    captions = FeatureStore.open(store).select("caption <> ''").column("caption").to_pylist()
    training = SupervisedTraining(steps=steps, batch_size=batch_size, learning_rate=learning_rate)
    with new_directory(out) as folder:
        report = model_training.train_policy(
            store,
            folder,
            tokenizer=ImageTokenizer.load(tokenizer),
            captions=captions,
            where=where,
            training=training,
            seed=seed,
        )
    text = f"{out}: text loss {report.text_loss:.3f}, image loss {report.image_loss:.3f} nats a token"
    tell({"model": str(out), **asdict(report)}, text, as_json)


TOKENIZER_COMMANDS: Final[Mapping[str, Callable[..., None]]] = {"train": train_tokenizer, "encode": encode}
