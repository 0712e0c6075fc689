"""Make a joint-vocabulary policy out of a causal language model and an image tokenizer."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from unirl.errors import ConfigError
from unirl.policies.image_tokenizer import ImageTokenizer
from unirl.policies.token_lm import TokenLM
from unirl.policies.vocabulary import BEGIN_IMAGE, BOS, END_IMAGE, PAD, ImageGrid, JointVocabulary

__all__ = ["FirstVectors", "join_vocabulary"]

ROW_END = "<eol>"

FirstVectors = Literal["mean", "codebook"]
"""How image codes are first embedded: all near the mean of the words, or spread as in the codebook."""


@torch.no_grad()
def join_vocabulary(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    images: ImageTokenizer,
    *,
    row_ends: bool = False,
    first_vectors: FirstVectors = "mean",
    noise: float = 0.02,
    seed: int = 0,
) -> TokenLM:
    """Give a language model the codes of an image tokenizer as words of its own.

    The marks that the tokenizer lacks, then one id for each code, stand behind its tokens. Rows of embedding
    and head for the new ids are set to

        mean:      m + noise * s * n
        codebook:  m + s * C P + noise * s * n

    with m the mean and s the standard deviation of the rows that were there, n and P standard normal by the
    seed, C the codebook, standardised and divided by the square root of its width. What the model says of
    text, given text, does not change among the old ids.

    Args:
        lm: Changed in place: its embedding grows, unless it has unused rows enough.
        tokenizer: Changed in place: it gets the marks `<boi>`, `<eoi>`, and `<bos>`, `<pad>` if it has none.
        images: Gives the number of codes, the grid and the codebook.
        row_ends: Let `<eol>` stand behind each row of codes.
        first_vectors: The form above.
        noise: In standard deviations of the old rows.
        seed: Decides every random number.

    Raises:
        ConfigError: If the tokenizer has more ids than the model embeds, or no end-of-text token.
    """
    old = len(tokenizer)
    held = cast(nn.Embedding, lm.get_input_embeddings()).num_embeddings
    if old > held:
        raise ConfigError(
            f"the tokenizer has {old} ids, the model embeds {held}; they do not belong together"
        )
    _add_marks(tokenizer, row_ends=row_ends)
    grid = ImageGrid(
        offset=len(tokenizer),
        num_codes=images.num_codes,
        rows=images.grid_size,
        columns=images.grid_size,
        row_end=ROW_END if row_ends else None,
    )
    vocabulary = JointVocabulary(tokenizer, grid)
    if vocabulary.size > held:
        with torch.random.fork_rng(devices=[]):  # transformers fills the new rows; they are set below.
            lm.resize_token_embeddings(vocabulary.size, mean_resizing=False)
    codebook = images.model.quantize.embedding.weight if first_vectors == "codebook" else None
    generator = torch.Generator().manual_seed(seed)
    inputs, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    _set_rows(cast(Tensor, inputs.weight), old, grid, codebook, noise, generator)
    if head.weight is not inputs.weight:
        _set_rows(cast(Tensor, head.weight), old, grid, codebook, noise, generator)
    if getattr(head, "bias", None) is not None:
        head.bias[old : vocabulary.size] = head.bias[:old].mean()
    for config in (lm.config, lm.generation_config):
        if config is not None:
            config.pad_token_id, config.bos_token_id = vocabulary.pad, vocabulary.bos
            config.eos_token_id = vocabulary.eos
    return TokenLM(lm, vocabulary)


def _add_marks(tokenizer: PreTrainedTokenizerFast, *, row_ends: bool) -> None:
    if tokenizer.eos_token is None:
        raise ConfigError("the tokenizer has no end-of-text token (eos_token); set it in its configuration")
    tokenizer.add_special_tokens(
        {
            "pad_token": tokenizer.pad_token or PAD,
            "bos_token": tokenizer.bos_token or BOS,
            "additional_special_tokens": [BEGIN_IMAGE, END_IMAGE, *([ROW_END] if row_ends else [])],
        },
        replace_extra_special_tokens=False,
    )


def _set_rows(
    weight: Tensor,
    old: int,
    grid: ImageGrid,
    codebook: Tensor | None,
    noise: float,
    generator: torch.Generator,
) -> None:
    """Overwrite the rows behind the first `old` ones, in float32 on the CPU for one result everywhere."""
    known = weight[:old].float().cpu()
    mean, spread = known.mean(dim=0), known.std(dim=0)
    behind = grid.offset + grid.num_codes
    rows = mean + noise * spread * torch.randn(behind - old, len(mean), generator=generator)
    if codebook is not None:
        codes = codebook.float().cpu()
        codes = (codes - codes.mean(dim=0)) / codes.std(dim=0).clamp_min(1e-6)
        projection = torch.randn(codes.shape[1], len(mean), generator=generator) / codes.shape[1] ** 0.5
        rows[grid.offset - old :] += spread * (codes @ projection)
    weight[old:behind] = rows.to(weight.device, weight.dtype)
