"""One vocabulary for words and image codes, and the grammar that keeps them apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from unirl.errors import ConfigError
from unirl.types import Direction

__all__ = ["ImageGrid", "JointVocabulary", "word_tokenizer"]

GRID_FILE = "image_grid.json"
PAD, UNKNOWN, BOS, EOS, BEGIN_IMAGE, END_IMAGE = "<pad>", "<unk>", "<bos>", "<eos>", "<boi>", "<eoi>"


def word_tokenizer(captions: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one id a word: the specials first, then the words in sorted order.

    Words are runs of letters and digits; any other character that is not a space is a word of its own.
    """
    splitter = pre_tokenizers.Whitespace()
    words = sorted({word for caption in captions for word, _ in splitter.pre_tokenize_str(caption)})
    ids = {word: i for i, word in enumerate([PAD, UNKNOWN, BOS, EOS, BEGIN_IMAGE, END_IMAGE, *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[BEGIN_IMAGE, END_IMAGE],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGrid:
    """Where the image codes stand in the vocabulary and how many make a picture."""

    offset: int
    """Id of code 0."""
    num_codes: int
    rows: int
    columns: int

    @property
    def length(self) -> int:
        """Codes of one picture."""
        return self.rows * self.columns


class JointVocabulary:
    """Text ids, then image codes, in the vocabulary of one plain causal language model.

    A picture is read as `<boi> c1 ... cN <eoi>`. The grammar of a response: words and `<eos>` when the policy
    writes text, exactly rows x columns codes when it draws. Everything else is masked out of the
    distribution, in rollout and in training alike.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, grid: ImageGrid) -> None:
        if grid.offset < len(tokenizer):
            raise ConfigError(
                f"image codes start at id {grid.offset}, inside the text vocabulary of {len(tokenizer)} ids; "
                "give an offset at or above its size"
            )
        self.tokenizer = tokenizer
        self.grid = grid
        self.pad, self.bos, self.eos = (
            self._special(token) for token in (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token)
        )
        self.begin_image, self.end_image = self._special(BEGIN_IMAGE), self._special(END_IMAGE)

    def _special(self, token: str | None) -> int:
        found = None if token is None else self.tokenizer.get_vocab().get(token)
        if found is None:
            raise ConfigError(
                f"the tokenizer has no {token or 'pad, bos or eos'} token; it needs pad, bos, eos, "
                f"{BEGIN_IMAGE} and {END_IMAGE}"
            )
        return int(found)

    @classmethod
    def from_captions(
        cls, captions: Iterable[str], *, num_codes: int, rows: int, columns: int
    ) -> JointVocabulary:
        """Build a word-level vocabulary with the image codes right behind the words."""
        tokenizer = word_tokenizer(captions)
        grid = ImageGrid(offset=len(tokenizer), num_codes=num_codes, rows=rows, columns=columns)
        return cls(tokenizer, grid)

    @property
    def size(self) -> int:
        """Ids in total."""
        return self.grid.offset + self.grid.num_codes

    def words(self, caption: str) -> list[int]:
        """Ids of a caption's words, without specials; a special that a caption writes out stays text."""
        return list(self.tokenizer.encode(caption, add_special_tokens=False, split_special_tokens=True))

    def text(self, ids: Sequence[int]) -> str:
        """Words of text ids up to the first `<eos>`, joined as the tokenizer joins them."""
        ids = list(ids)
        ended = ids.index(self.eos) if self.eos in ids else len(ids)
        return str(self.tokenizer.decode(ids[:ended], skip_special_tokens=True))

    def picture(self, codes: Sequence[int]) -> list[int]:
        """Ids of a whole picture in a prompt: `<boi>`, the codes, `<eoi>`."""
        if len(codes) != self.grid.length:
            raise ConfigError(f"a picture has {self.grid.length} codes, found {len(codes)}")
        wrong = [int(code) for code in codes if not 0 <= code < self.grid.num_codes]
        if wrong:
            raise ConfigError(
                f"code {wrong[0]} is none of the {self.grid.num_codes} codes of this vocabulary; "
                "encode the pictures with the tokenizer that the policy was trained with"
            )
        return [self.begin_image, *(int(code) + self.grid.offset for code in codes), self.end_image]

    def allowed(self, direction: Direction) -> Tensor:
        """bool (V,), True on the ids that a response may hold."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        if direction == "image":
            mask[self.grid.offset :] = True
            return mask
        mask[: len(self.tokenizer)] = True
        mask[list(self.tokenizer.all_special_ids)] = False
        mask[self.eos] = True
        return mask

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files and the grid."""
        self.tokenizer.save_pretrained(directory)
        fields = {name: getattr(self.grid, name) for name in ("offset", "num_codes", "rows", "columns")}
        (directory / GRID_FILE).write_text(json.dumps(fields, indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> JointVocabulary:
        """Read what `save` wrote."""
        path = directory / GRID_FILE
        if not path.is_file():
            raise ConfigError(f"{directory}: no {GRID_FILE}, so this is no joint-vocabulary policy")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        return cls(tokenizer, ImageGrid(**json.loads(path.read_text())))
