"""Rewards that need no model: rules about the words, and about the numbers of a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import regex

from unirl.errors import ConfigError
from unirl.rewards.failures import Problem, account
from unirl.rewards.identity import identity_of
from unirl.types import Sample, Scores

__all__ = ["ExactMatch", "Format", "Length", "Pattern", "Rule", "matches_format"]

MAX_PATTERN_SECONDS = 0.1


class Rule:
    """Score each sample by itself with a function of the library.

    Args:
        name: Of the component.
        rule: Sample -> score, or a `Problem` where there is none.
        settings: What the rule was made with; part of `identity`.
        max_failed_fraction: Share of the samples of one call that may go without a score.
    """

    def __init__(
        self,
        name: str,
        rule: Callable[[Sample], float | Problem],
        *,
        settings: object = None,
        max_failed_fraction: float = 0.1,
    ) -> None:
        self.name = name
        self.rule = rule
        self.max_failed_fraction = max_failed_fraction
        self.failures: Counter[str] = Counter()
        """Samples without a score since the start, by reason."""
        self.identity = identity_of(name, settings)
        """Another string where the same sample might get another score."""

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order.

        Raises:
            RewardError: If more than `max_failed_fraction` of the samples could not be scored.
        """
        total = np.full(len(samples), np.nan)
        problems: dict[int, Problem] = {}
        for row, sample in enumerate(samples):
            result = self.rule(sample)
            if isinstance(result, Problem):
                problems[row] = result
            else:
                total[row] = result
        account(
            self.failures,
            samples,
            problems,
            reward=self.name,
            max_failed_fraction=self.max_failed_fraction,
        )
        return Scores(total=total, components={self.name: total.copy()})


class ExactMatch(Rule):
    """1 where the caption is the true caption, word for word, else 0. Only blanks between words are forgiven.

    Of use in direction "text"; in direction "image" caption and target are the same words, and all score 1.
    """

    def __init__(self) -> None:
        super().__init__("exact_match", lambda sample: float(sample.caption.split() == sample.target.split()))


class Pattern(Rule):
    """1 where a regular expression is found in the caption, else 0; NaN where the search takes too long.

    Some patterns take exponential time on some texts, for example `(a|aa)+$` on "aaaa...b". The search is
    given up after `max_seconds`, and the sample has no score, with the reason "pattern time".

    Args:
        pattern: In the syntax of the `regex` package, which reads that of `re`.
        whole: Whether the pattern must match the whole caption.
        max_seconds: Longest search in one caption.

    Raises:
        ConfigError: If the pattern is no regular expression.
    """

    def __init__(
        self,
        pattern: str,
        *,
        name: str = "pattern",
        whole: bool = False,
        max_seconds: float = MAX_PATTERN_SECONDS,
        max_failed_fraction: float = 0.1,
    ) -> None:
        try:
            compiled = regex.compile(pattern)
        except regex.error as error:
            raise ConfigError(f"reward {name}: {pattern!r} is no regular expression: {error}") from None
        find = compiled.fullmatch if whole else compiled.search

        def rule(sample: Sample) -> float | Problem:
            try:
                return float(find(sample.caption, timeout=max_seconds) is not None)
            except TimeoutError:
                return Problem(
                    reason="pattern time",
                    text=f"{pattern!r} took over {max_seconds:g} s on {len(sample.caption)} characters",
                )

        super().__init__(
            name, rule, settings=[pattern, whole, max_seconds], max_failed_fraction=max_failed_fraction
        )


class Length(Rule):
    """1 for a caption of `low` to `high` words, falling to 0 over `slack` words on both sides.

    Args:
        slack: Words outside the range after which the score is 0; 0 makes a step.
    """

    def __init__(self, low: int, high: int, *, slack: int = 0, name: str = "length") -> None:
        if not 0 <= low <= high or slack < 0:
            raise ConfigError(
                f"reward {name}: low {low}, high {high}, slack {slack}; wanted 0 <= low <= high"
            )

        def rule(sample: Sample) -> float:
            words = len(sample.caption.split())
            outside = max(low - words, words - high, 0)
            return float(outside == 0) if slack == 0 else max(0.0, 1.0 - outside / slack)

        super().__init__(name, rule, settings=[low, high, slack])


class Format(Rule):
    """1 where the caption has the asked form, else 0.

    Args:
        form: Literal text with `{name}` for what may be anything but empty, for example
            `"<think>{reasoning}</think><answer>{answer}</answer>"`. Blanks around literal parts
            and between tags are free.
    """

    def __init__(self, form: str, *, name: str = "format") -> None:
        super().__init__(name, lambda sample: float(matches_format(sample.caption, form)), settings=form)


def matches_format(text: str, form: str) -> bool:
    """Say whether a text consists of the literal parts of a form, each once and in order, and fillings."""
    text, form = (regex.sub(r">\s+<", "><", words) for words in (text, form))
    literals = [part.strip() for part in regex.split(r"\{\w+\}", form)]
    if any(literal and text.count(literal) != 1 for literal in set(literals)):
        return False
    place = 0
    for number, literal in enumerate(literals):
        found = len(text) if number == len(literals) - 1 and not literal else text.find(literal, place)
        filling = text[place:found].strip()
        if found < 0 or bool(filling) != (number > 0):
            return False
        place = found + len(literal)
    return not text[place:].strip()
