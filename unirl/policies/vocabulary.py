"""One vocabulary for words and image codes, and the grammar that keeps them apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence, Sized
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from unirl.errors import ConfigError, RolloutError
from unirl.types import Direction
from unirl.words import apart, together

__all__ = ["Grammar", "ImageGrid", "JointVocabulary", "word_tokenizer"]

GRID_FILE = "image_grid.json"
PAD, UNKNOWN, BOS, EOS, BEGIN_IMAGE, END_IMAGE = "<pad>", "<unk>", "<bos>", "<eos>", "<boi>", "<eoi>"


def word_tokenizer(captions: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one id a word: the specials first, then the words in sorted order.

    Words are runs of letters and digits. Any other character that is not a space is a word of its own, and so
    is each character of a script without spaces (`unirl.words`). Decoding gives the caption back, with one
    space where it has several; an id stands for a word with a space before it or for one without.
    """
    normalizer = apart(symbols=True)
    words = sorted({word for caption in captions for word in normalizer.normalize_str(caption).split()})
    ids = {word: i for i, word in enumerate([PAD, UNKNOWN, BOS, EOS, BEGIN_IMAGE, END_IMAGE, *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = together()
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
    """Where the image codes stand in the vocabulary, how many make a picture, and what stands around them.

    Example: the grid of Emu3 is `ImageGrid(offset=151854, num_codes=32768, rows=90, columns=90,
    row_end="<|extra_200|>", begin_image="<|image start|>", end_image="<|image end|>",
    head="90*90<|image token|>", tail="<|extra_201|>")`.
    """

    offset: int
    """Id of code 0."""
    num_codes: int
    rows: int
    columns: int
    row_end: str | None = None
    """Token that stands behind each row of codes, the last one included."""
    begin_image: str = BEGIN_IMAGE
    end_image: str = END_IMAGE
    head: str = ""
    """What stands between `begin_image` and the first code, as the tokenizer reads it."""
    tail: str = ""
    """What stands between the last row and `end_image`."""

    @property
    def length(self) -> int:
        """Codes of one picture."""
        return self.rows * self.columns

    @property
    def response_length(self) -> int:
        """Ids of one picture when it is drawn: its codes and row ends."""
        return self.length + (0 if self.row_end is None else self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The ids that a response may hold, as few different masks and where each of them stands."""

    masks: Tensor
    """bool (K, V)."""
    places: Tensor
    """int64 (T,), the mask of each place of a response; (0,) if the first mask stands everywhere."""


class JointVocabulary:
    """Text ids and image codes in the vocabulary of one causal language model.

    A picture is read as `<boi> c1 ... cN <eoi>`, with a row end behind each row where the grid has one. The
    grammar of a response: words and `<eos>` when the policy writes text, exactly the codes and row ends of a
    picture when it draws. Everything else is masked out of the distribution, in rollout and in training
    alike.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, grid: ImageGrid) -> None:
        self.tokenizer = tokenizer
        self.grid = grid
        self._require_codes_apart()
        self.pad, self.bos, self.eos = (
            self._special(token) for token in (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token)
        )
        self.begin_image, self.end_image = self._special(grid.begin_image), self._special(grid.end_image)
        self.row_end = None if grid.row_end is None else self._special(grid.row_end)
        self.start_of_picture = [self.begin_image, *self._encode(grid.head)]
        self.end_of_picture = [*self._encode(grid.tail), self.end_image]

    def _require_codes_apart(self) -> None:
        """Codes stand behind the text ids, or in place of tokens that were added for them."""
        first, size = self.grid.offset, len(self.tokenizer)
        inside = range(first, min(first + self.grid.num_codes, size))
        added = self.tokenizer.added_tokens_decoder
        if first < 0 or any(i not in added for i in inside):
            raise ConfigError(
                f"image codes start at id {first}, inside the text vocabulary of {size} ids; "
                "give an offset at or above its size, or that of tokens which were added for the codes"
            )

    def _special(self, token: str | None) -> int:
        found = None if token is None else self.tokenizer.get_vocab().get(token)
        if found is None:
            raise ConfigError(
                f"the tokenizer has no {token or 'pad, bos or eos'} token; it needs pad, bos, eos, "
                f"{self.grid.begin_image} and {self.grid.end_image}"
            )
        return int(found)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

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
        return max(self.grid.offset + self.grid.num_codes, len(self.tokenizer))

    def words(self, caption: str) -> list[int]:
        """Ids of a caption's words, without specials; a special that a caption writes out stays text.

        Raises:
            ConfigError: If the caption is no proper text, or writes out the name of an image code.
        """
        if not isinstance(caption, str) or not _is_unicode(caption):
            raise ConfigError(f"a caption or question is {caption!r:.80}; it needs text that UTF-8 can hold")
        ids = list(self.tokenizer.encode(caption, add_special_tokens=False, split_special_tokens=True))
        codes = [i for i in ids if 0 <= i - self.grid.offset < self.grid.num_codes]
        if codes:
            raise ConfigError(
                f"caption {caption!r} holds {self.tokenizer.convert_ids_to_tokens(codes[0])!r}, which is an "
                "image code and no word; take it out of the caption"
            )
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Words of text ids up to the first `<eos>`, joined as the tokenizer joins them."""
        ids = list(ids)
        ended = ids.index(self.eos) if self.eos in ids else len(ids)
        return str(self.tokenizer.decode(ids[:ended], skip_special_tokens=True))

    def picture(self, codes: Sequence[int]) -> list[int]:
        """Ids of a whole picture in a prompt: `<boi>`, the codes row by row, `<eoi>`."""
        return [*self.start_of_picture, *self.drawing(codes), *self.end_of_picture]

    def drawing(self, codes: Sequence[int]) -> list[int]:
        """Ids of a picture as a response: its codes, with the row ends that the grid has."""
        if not isinstance(codes, Sized) or len(codes) != self.grid.length:
            found = len(codes) if isinstance(codes, Sized) else repr(codes)
            raise ConfigError(f"a picture has {self.grid.length} codes, found {found}")
        wrong = [
            code for code in codes if not isinstance(code, Integral) or not 0 <= code < self.grid.num_codes
        ]
        if wrong:
            raise ConfigError(
                f"code {wrong[0]!r} is none of the {self.grid.num_codes} codes of this vocabulary; "
                "encode the pictures with the tokenizer that the policy was trained with"
            )
        ids = [int(code) + self.grid.offset for code in codes]
        if self.row_end is None:
            return ids
        width = self.grid.columns
        rows = [ids[start : start + width] for start in range(0, len(ids), width)]
        return [i for row in rows for i in (*row, self.row_end)]

    def codes(self, drawings: Tensor) -> Tensor:
        """Codes of drawings; the inverse of `drawing`, for a batch.

        Args:
            drawings: int64 (B, T), T = `grid.response_length`.

        Returns:
            int64 (B, rows * columns), each in [0, num_codes).

        Raises:
            RolloutError: If the number of ids is another, a row end is missing, or an id is no code.
        """
        grid = self.grid
        if drawings.ndim != 2 or drawings.shape[1] != grid.response_length:
            raise RolloutError(
                f"a drawing has {grid.response_length} ids ({grid.rows} x {grid.columns} codes"
                f"{'' if self.row_end is None else ' and a row end behind each row'}), "
                f"found an array of shape {tuple(drawings.shape)}"
            )
        codes = drawings - grid.offset
        if self.row_end is not None:
            rows = drawings.unflatten(1, (grid.rows, grid.columns + 1))
            ends = rows[..., -1] == self.row_end
            if not bool(ends.all()):
                row, line = (int(i) for i in (~ends).nonzero()[0])
                raise RolloutError(
                    f"row {row}: line {line} of the drawing ends with id {int(rows[row, line, -1])}, "
                    f"a row end is {self.row_end}"
                )
            codes = rows[..., :-1].flatten(1) - grid.offset
        wrong = (codes < 0) | (codes >= grid.num_codes)
        if bool(wrong.any()):
            row, place = (int(i) for i in wrong.nonzero()[0])
            raise RolloutError(
                f"row {row}: id {int(codes[row, place]) + grid.offset} at place {place} is no image code; "
                f"codes have ids {grid.offset} to {grid.offset + grid.num_codes - 1}"
            )
        return codes

    def grammar(self, direction: Direction) -> Grammar:
        """Return what a response in this direction may hold, V = `size`."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        first, behind = self.grid.offset, self.grid.offset + self.grid.num_codes
        everywhere = torch.zeros(0, dtype=torch.int64)
        if direction == "text":
            mask[: len(self.tokenizer)] = True
            mask[first:behind] = False
            mask[list(self.tokenizer.all_special_ids)] = False
            mask[[self.begin_image, self.end_image]] = False
            mask[self.eos] = True
            return Grammar(masks=mask[None], places=everywhere)
        mask[first:behind] = True
        if self.row_end is None:
            return Grammar(masks=mask[None], places=everywhere)
        end = torch.zeros_like(mask)
        end[self.row_end] = True
        places = torch.tensor(([0] * self.grid.columns + [1]) * self.grid.rows)
        return Grammar(masks=torch.stack([mask, end]), places=places)

    def allowed(self, direction: Direction) -> Tensor:
        """True on the ids that a response may hold: bool (V,), or (T, V) where that depends on the place."""
        grammar = self.grammar(direction)
        return grammar.masks[grammar.places] if len(grammar.places) else grammar.masks[0]

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files and the grid."""
        self.tokenizer.save_pretrained(directory)
        (directory / GRID_FILE).write_text(json.dumps(asdict(self.grid), indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> JointVocabulary:
        """Read what `save` wrote."""
        path = directory / GRID_FILE
        if not path.is_file():
            raise ConfigError(f"{directory}: no {GRID_FILE}, so this is no joint-vocabulary policy")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        return cls(tokenizer, ImageGrid(**json.loads(path.read_text())))


def _is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
