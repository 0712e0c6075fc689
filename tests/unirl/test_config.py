from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from unirl.config import nearest, replace_settings
from unirl.errors import ConfigError

Direction = Literal["text", "image"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    steps: int = 10
    direction: Direction | Literal["both"] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    side: int = 8
    patch: int = 4
    widths: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if self.side % self.patch:
            raise ConfigError(f"side {self.side} is not a multiple of patch {self.patch}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    sizes: Sizes = field(default_factory=Sizes)
    rate: float = 0.5
    limit: int | None = None
    show: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    title: str = "run"
    training: Training = field(default_factory=Training)
    parts: tuple[Part, ...] = (Part(name="one"), Part(name="two"))


RUN = Run()


def test_plain_and_nested_fields() -> None:
    run = replace_settings(RUN, ["title=a new name", "training.rate=1e-3", "training.sizes.side=16"])
    assert run.title == "a new name"
    assert run.training.rate == 1e-3
    assert run.training.sizes == Sizes(side=16)
    assert Run() == RUN, "the original stays"


def test_parts_of_a_tuple_go_by_name_and_keep_their_order() -> None:
    run = replace_settings(RUN, ["two.steps=7", "one.direction=image"])
    assert run.parts == (Part(name="one", direction="image"), Part(name="two", steps=7))


def test_choices_of_two_lists_are_one_list() -> None:
    assert replace_settings(RUN, ["one.direction=both"]).parts[0].direction == "both"
    with pytest.raises(ConfigError, match="found 'none', wanted text or image or both"):
        replace_settings(RUN, ["one.direction=none"])


def test_the_last_of_two_values_counts() -> None:
    assert replace_settings(RUN, ["training.rate=1", "training.rate=2"]).training.rate == 2.0


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("training.show=true", True),
        ("training.show=False", False),
        ("training.limit=3", 3),
        ("training.limit=none", None),
        ("training.sizes.widths=1,2,4", (1, 2, 4)),
        ("training.sizes.widths=3", (3,)),
        (" training.rate = 0.25 ", 0.25),
        ("title=a=b", "a=b"),
        ("title=", ""),
    ],
)
def test_values_by_type(assignment: str, value: object) -> None:
    run = replace_settings(RUN, [assignment])
    name = assignment.partition("=")[0].strip().split(".")[-1]
    owner = next(part for part in (run, run.training, run.training.sizes) if name in part.__slots__)
    found = getattr(owner, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.rate=fast", r"training\.rate: found 'fast', wanted a number"),
        ("training.rate=nan", r"training\.rate: found 'nan', wanted a number"),
        ("training.rate=inf", r"training\.rate: found 'inf', wanted a number"),
        ("one.steps=1.5", r"one\.steps: found '1\.5', wanted a whole number"),
        ("one.steps=none", r"one\.steps: found 'none', wanted a whole number"),
        ("training.limit=many", r"training\.limit: found 'many', wanted a whole number or none"),
        ("training.show=yes", r"training\.show: found 'yes', wanted true or false"),
        ("one.direction=sound", r"one\.direction: found 'sound', wanted text or image"),
        ("training.sizes.widths=1,x", r"training\.sizes\.widths: found 'x', wanted a whole number"),
        ("training=3", r"training: .*its own: limit, rate, show, sizes"),
        ("parts=3", r"parts: .*by name: one, two"),
        ("training.ratte=3", r"there is no setting 'ratte'; did you mean 'rate'\?"),
        ("trainign.rate=3", r"there is no setting 'trainign'; did you mean 'training'\?"),
        ("twoo.steps=3", r"there is no setting 'twoo'; did you mean 'two'\?"),
        ("title.size=3", r"title\.size: 'title' has no settings of its own"),
        ("one.steps.more=3", r"one\.steps\.more: 'steps' has no settings of its own"),
        ("=3", r"'=3' is no setting; write path=value"),
        ("title", r"'title' is no setting; write path=value"),
    ],
)
def test_what_does_not_fit_is_said(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace_settings(RUN, [assignment])


def test_everything_wrong_comes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        replace_settings(RUN, ["title=fine", "training.rate=fast", "thre.steps=1", "nothing"])
    message = str(caught.value)
    assert len(message.splitlines()) == 3
    assert "'fast'" in message and "'thre'" in message and "'nothing' is no setting" in message


def test_settings_that_fit_together_only_together() -> None:
    """Neither is right alone: 9 is no multiple of 4, and 8 none of 3."""
    run = replace_settings(RUN, ["training.sizes.side=9", "training.sizes.patch=3"])
    assert run.training.sizes == Sizes(side=9, patch=3)


def test_what_the_values_mean_together_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"training\.sizes: side 9 is not a multiple of patch 4"):
        replace_settings(RUN, ["training.sizes.side=9"])


def test_no_assignment_gives_an_equal_run() -> None:
    assert replace_settings(RUN, []) == RUN


def test_the_nearest_name_or_all_of_them() -> None:
    assert nearest("shpaes", ["numbers", "shapes"]) == "; did you mean 'shapes'?"
    assert nearest("xyz", ["numbers", "shapes"]) == "; known are numbers, shapes"
    assert nearest("Shapes", ["numbers", "shapes"]) == "; did you mean 'shapes'?"
