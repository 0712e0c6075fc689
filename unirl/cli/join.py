"""`unirl join`: one policy out of a language model and an image tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unirl.cli.output import AsJson, tell
from unirl.errors import ConfigError
from unirl.model_folder import IMAGE_TOKENIZER, model_type, require_model
from unirl.trainer.run_directory import new_directory

__all__ = ["join"]


def join(
    lm: Annotated[Path, typer.Argument(help="Folder of a causal language model of transformers.")],
    tokenizer: Annotated[Path, typer.Argument(help="Folder of a JanusVQVAE.")],
    out: Annotated[Path, typer.Option("--out", help="New folder for the policy.")],
    row_ends: Annotated[bool, typer.Option("--row-ends", help="A token behind each row of codes.")] = False,
    first_vectors: Annotated[
        str, typer.Option("--first-vectors", help="Embed new codes by the 'mean' of all words or 'codebook'.")
    ] = "mean",
    noise: Annotated[float, typer.Option(min=0.0, help="Deviations of the old embeddings.")] = 0.02,
    seed: Annotated[int, typer.Option(min=0, help="Decides every random number.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write a policy whose vocabulary holds the words of a language model and the codes of pictures.

    Example: unirl join models/qwen3 models/vq --out models/policy --row-ends
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    from unirl.policies.image_tokenizer import ImageTokenizer
    from unirl.policies.join_vocabulary import join_vocabulary

    if first_vectors not in ("mean", "codebook"):
        raise ConfigError(f"--first-vectors is 'mean' or 'codebook', found {first_vectors!r}")
    model_type(lm)
    require_model(tokenizer, IMAGE_TOKENIZER)
    words = AutoTokenizer.from_pretrained(lm)
    if not isinstance(words, PreTrainedTokenizerFast):
        raise ConfigError(f"{lm}: its tokenizer has no tokenizer.json; save it as a fast tokenizer")
    policy = join_vocabulary(
        AutoModelForCausalLM.from_pretrained(lm, dtype="auto"),
        words,
        ImageTokenizer.load(tokenizer),
        row_ends=row_ends,
        first_vectors="codebook" if first_vectors == "codebook" else "mean",
        noise=noise,
        seed=seed,
    )
    with new_directory(out) as folder:
        policy.save(folder)
    grid = policy.vocabulary.grid
    text = (
        f"{out}: {grid.offset} text ids, {grid.num_codes} image codes from id {grid.offset}, "
        f"{grid.rows} x {grid.columns} codes a picture"
    )
    facts = {"num_text_ids": grid.offset, "num_codes": grid.num_codes, "rows": grid.rows}
    tell({"model": str(out), **facts, "columns": grid.columns}, text, as_json)
