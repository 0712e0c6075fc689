from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from recipes.worlds.shapes import (
    Thing,
    all_captions,
    all_scenes,
    caption_of,
    choose_held_out,
    draw_scene,
    scene_in_caption,
    write_shapes,
)
from unirl.errors import ConfigError

RED = Thing("large", "red", "circle", "left")
BLUE = Thing("small", "blue", "square", "right")


def test_captions_say_what_is_there() -> None:
    assert caption_of((RED,)) == "a large red circle on the left"
    assert caption_of((RED, BLUE)) == "a large red circle on the left and a small blue square on the right"


def test_every_caption_reads_back() -> None:
    scenes = all_scenes(max_things=2)
    assert len(scenes) == 96 + 1152
    assert [scene_in_caption(caption_of(scene)) for scene in scenes] == list(scenes)
    assert len(set(all_captions())) == 96


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a large red circle",
        "a red large circle on the left",
        "a large red circle on the left and",
        "a large red circle on the left and a large red circle on the left",
        "a small blue square on the right and a large red circle on the left",
    ],
)
def test_malformed_captions_are_no_scene(caption: str) -> None:
    assert scene_in_caption(caption) is None


@pytest.mark.parametrize("seed", range(5))
def test_held_out_things_leave_every_word_in_training(seed: int) -> None:
    things = choose_held_out(seed)
    assert len(things) == 16
    for words, most in (("size", 8), ("colour", 4), ("shape", 6), ("place", 4)):
        assert max(Counter(getattr(thing, words) for thing in things).values()) <= most


@pytest.mark.parametrize("max_things", [1, 2])
def test_training_files_hold_nothing_held_out(tmp_path: Path, max_things: int) -> None:
    files = write_shapes(tmp_path / "s", seed=1, num_sft=150, num_rl=60, num_eval=40, max_things=max_things)
    with (files.sft / "metadata.csv").open(newline="") as file:
        sft = list(csv.DictReader(file))
    rl = [json.loads(line) for line in (files.rl / "metadata.jsonl").read_text().splitlines()]
    assert (len(sft), len(rl)) == (150, 60)
    assert not {row["caption"] for row in [*sft, *rl]}.intersection(files.held_out)
    assert {row["num_things"] for row in rl} == set(range(1, max_things + 1))


def test_drawings_differ_by_their_shift_only() -> None:
    rng = np.random.default_rng(0)
    drawings = {draw_scene((BLUE,), rng).tobytes() for _ in range(100)}
    assert len(drawings) == 9


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_things: found 3"):
        write_shapes(tmp_path / "s", seed=0, max_things=3)
    with pytest.raises(ConfigError, match="found 49, wanted 0 to 48"):
        choose_held_out(0, count=49)
