"""Real handwriting: numbers from 10 to 99, made of scikit-learn's bundled handwritten digits.

The 1,797 digits (8x8, values 0..16, UCI "Optical Recognition of Handwritten Digits") are dealt into four
disjoint pools, so that no digit that the judge, the supervised stage or RL has seen occurs in evaluation. Two
digits of one pool side by side, enlarged and placed on 32x32 paper, make a number. Some numbers are held out
of all training, though each of their digits is seen often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from recipes.worlds.number_words import NUMBERS, number_to_words
from recipes.worlds.world_files import Picture, WorldFiles, write_world
from unirl.errors import ConfigError

__all__ = ["DigitPools", "all_captions", "caption_of", "choose_held_out", "deal_digits", "write_numbers"]

SIDE = 32
"""Height and width of a picture in pixels."""
DIGIT_SIDE = 16
"""Height and width of the box of one digit in pixels."""
TOP_Y = 8
"""Row at which the two boxes start. They stand side by side and fill the width, as on a form."""
PAPER = np.array([250, 246, 236])
INK = np.array([28, 34, 72])


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitPools:
    """How many of the 1,797 digits go to the judge and to each split; the evaluation takes the rest."""

    judge: int = 600
    sft: int = 350
    rl: int = 550


def caption_of(number: int) -> str:
    """Return the caption of a number, for example "a handwritten forty two"."""
    return f"a handwritten {number_to_words(number)}"


def all_captions() -> tuple[str, ...]:
    """Return the captions of every number, held out or not, in numerical order."""
    return tuple(caption_of(number) for number in NUMBERS)


def choose_held_out(seed: int, *, count: int = 18) -> tuple[int, ...]:
    """Choose numbers among 21..99 without those that end in 0, spread evenly over tens and units.

    Each units digit and each tens digit is taken almost equally often, so that with the default count every
    digit keeps at least five numbers to be learnt from in either place.

    Raises:
        ConfigError: If the count is outside 0..36.
    """
    if not 0 <= count <= 36:
        raise ConfigError(f"count: found {count}, wanted 0 to 36 held-out numbers of the 72 that qualify")
    rng = np.random.default_rng([seed, 0])
    while True:
        tens = np.concatenate([rng.permutation(np.arange(2, 10)) for _ in range(5)])[:count]
        units = np.concatenate([rng.permutation(np.arange(1, 10)) for _ in range(4)])[:count]
        numbers = set((10 * tens + units).tolist())
        if len(numbers) == count:
            return tuple(sorted(numbers))


@lru_cache(maxsize=1)
def _digits() -> tuple[np.ndarray, np.ndarray]:
    bunch = load_digits()
    return bunch.images, bunch.target


def deal_digits(seed: int, pools: DigitPools) -> dict[str, dict[int, np.ndarray]]:
    """Deal the digits into disjoint pools, stratified by class.

    Returns:
        pool ("judge", "sft", "rl" or "eval") -> digit 0..9 -> float64 (n, 8, 8) in [0, 16].

    Raises:
        ConfigError: If a pool would be left with fewer than 5 digits of a class.
    """
    images, labels = _digits()
    rng = np.random.default_rng([seed, 1])
    bounds = np.cumsum([0, pools.judge, pools.sft, pools.rl, len(labels)])
    bounds = np.minimum(bounds, len(labels)) / len(labels)
    dealt: dict[str, dict[int, np.ndarray]] = {"judge": {}, "sft": {}, "rl": {}, "eval": {}}
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(labels == digit))
        cuts = np.rint(bounds * len(members)).astype(int)
        for pool, start, stop in zip(dealt, cuts[:-1], cuts[1:], strict=True):
            if stop - start < 5:
                raise ConfigError(
                    f"{pools}: leaves {stop - start} of digit {digit} to {pool}, wanted 5 or more"
                )
            dealt[pool][digit] = images[members[start:stop]]
    return dealt


def draw_number(number: int, pool: dict[int, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Draw a number with random digits of the pool; uint8 (32, 32, 3)."""
    ink = np.zeros((SIDE, SIDE, 1))
    for position, digit in enumerate(divmod(number, 10)):
        choices = pool[digit]
        columns = slice(position * DIGIT_SIDE, (position + 1) * DIGIT_SIDE)
        ink[TOP_Y : TOP_Y + DIGIT_SIDE, columns, 0] = _enlarge(choices[int(rng.integers(len(choices)))])
    pixels: np.ndarray = np.rint(PAPER + (INK - PAPER) * ink).astype(np.uint8)
    return pixels


def _enlarge(digit: np.ndarray) -> np.ndarray:
    """Enlarge an 8x8 digit smoothly; float64 (16, 16), 0 is paper and 1 is ink."""
    small = Image.fromarray((digit / 16).astype(np.float32))
    large = np.asarray(small.resize((DIGIT_SIDE, DIGIT_SIDE), Image.Resampling.BICUBIC), dtype=np.float64)
    stroke = np.clip((large - 0.1) / 0.85, 0, 1)
    return stroke * stroke * (3 - 2 * stroke)


def write_numbers(
    directory: str | Path,
    *,
    seed: int,
    num_sft: int = 3000,
    num_rl: int = 1500,
    num_eval: int = 400,
    num_held_out: int = 18,
    pools: DigitPools | None = None,
) -> WorldFiles:
    """Write handwritten numbers with captions as ordinary files; see `world_files` for the layout.

    The same arguments give the same bytes. Half of the evaluation shows held-out numbers, and each half goes
    round its numbers evenly. Metadata columns: caption and split, and in rl and
    eval also held_out and number.

    Args:
        directory: Made if absent, kept if it holds this very world.
        seed: Chooses the held-out numbers, deals the digits and draws the pictures.
        num_sft: Pictures for tokenizer, supervised stage and reward model.
        num_rl: Pictures for RL prompts.
        num_eval: Pictures for evaluation.
        num_held_out: Numbers that occur in the evaluation only.
        pools: How the digits are dealt.

    Raises:
        ConfigError: If `directory` holds something else, or a setting cannot be met.
    """
    pools = pools or DigitPools()
    held_out = choose_held_out(seed, count=num_held_out)
    dealt = deal_digits(seed, pools)
    seen = [number for number in NUMBERS if number not in held_out]
    rngs = {
        split: np.random.default_rng([seed, 2, place]) for place, split in enumerate(("sft", "rl", "eval"))
    }
    num_unseen = num_eval // 2 if held_out else 0
    eval_numbers = _evenly(held_out, num_unseen, rngs["eval"])
    eval_numbers += _evenly(seen, num_eval - num_unseen, rngs["eval"])
    numbers = {
        "sft": _evenly(seen, num_sft, rngs["sft"]),
        "rl": _evenly(seen, num_rl, rngs["rl"]),
        "eval": rngs["eval"].permutation(eval_numbers).tolist(),
    }
    parameters = {
        "world": "handwriting",
        "seed": seed,
        "num_sft": num_sft,
        "num_rl": num_rl,
        "num_eval": num_eval,
        "num_held_out": num_held_out,
        **{f"pool_{name}": size for name, size in asdict(pools).items()},
    }
    return write_world(
        directory,
        {name: _pictures(numbers[name], dealt[name], rngs[name], held_out) for name in numbers},
        parameters=parameters,
        held_out=[caption_of(number) for number in held_out],
    )


def _evenly(numbers: Sequence[int], count: int, rng: np.random.Generator) -> list[int]:
    """Return `count` numbers in random order, each as often as any other (give or take one)."""
    rounds = [rng.permutation(numbers) for _ in range(0, count, max(len(numbers), 1))]
    return np.concatenate(rounds)[:count].tolist() if rounds else []


def _pictures(
    numbers: Sequence[int], pool: dict[int, np.ndarray], rng: np.random.Generator, held_out: Sequence[int]
) -> Iterator[Picture]:
    for number in numbers:
        yield Picture(
            image=draw_number(number, pool, rng),
            caption=caption_of(number),
            held_out=number in held_out,
            facts={"number": number},
        )
