from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from storage import FeatureStore
from unirl.explore import Scores, contact_sheet, samples_over_time
from unirl.explore.gallery import cards
from unirl.trainer.prompts import FRAMES_COLUMN


@pytest.fixture
def long_run(tmp_path: Path) -> Scores:
    """Twenty steps; each has a prompt that always comes and four that come once."""
    store = FeatureStore.create(tmp_path / "experience")
    with store.writer(message="long") as writer:
        for step in range(1, 21):
            for prompt in ["always", *(f"{step}-{i}" for i in range(4))]:
                for sample in range(2):
                    writer.add(
                        f"{step:03d}/{prompt}/{sample}",
                        kind="train",
                        stage="text",
                        direction="text",
                        step=step,
                        prompt_key=prompt,
                        prompt="",
                        target="t",
                        response="r",
                        sample=sample,
                        reward=0.5,
                    )
    return Scores.open(tmp_path)


def test_steps_are_spread_evenly_and_hold_the_first_and_the_last(long_run: Scores) -> None:
    table = samples_over_time(long_run, kind="train", num_steps=4, per_step=3)
    assert list(dict.fromkeys(table["step"].to_pylist())) == [1, 7, 14, 20]
    assert table.num_rows == 12


def test_prompts_that_come_often_are_shown_and_each_only_once_a_step(long_run: Scores) -> None:
    rows = samples_over_time(long_run, kind="train", num_steps=3, per_step=2).to_pylist()
    assert sum(row["prompt_key"] == "always" for row in rows) == 3
    assert len({(row["step"], row["prompt_key"]) for row in rows}) == len(rows) == 6


def test_one_step_is_enough(long_run: Scores) -> None:
    only = long_run.where("step = 3")
    assert samples_over_time(only, kind="train", num_steps=1, per_step=9).num_rows == 5
    assert samples_over_time(only, kind="eval").num_rows == 0


def test_cards_say_what_was_asked_or_written(scores: Scores) -> None:
    for card in cards(scores, scores.where("kind = 'train'").best(12)):
        if card.direction == "image":
            assert card.asked == card.target and card.wrote == ""
        else:
            assert card.asked == "" and card.wrote
        assert dict(card.components)["vlm"] == card.reward


def test_small_pictures_are_embedded_pixel_for_pixel(scores: Scores) -> None:
    (card,) = cards(scores, scores.best(1))
    head, data = card.picture.split(",")
    embedded = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == "data:image/png;base64"
    np.testing.assert_array_equal(np.asarray(embedded.convert("RGB")), np.asarray(scores.picture(card.key)))


def test_what_is_said_of_a_clip_stands_below_its_frames(long_run: Scores, tmp_path: Path) -> None:
    clips = np.arange(2 * 7 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 7, 4, 4, 3)
    data = FeatureStore.create(tmp_path / "data")
    with data.writer(message="clips") as writer:
        for key in ("always", "other"):
            writer.add(key)
    data = data.refresh()
    data.add_column(FRAMES_COLUMN, lambda view: clips, dtype=np.uint8, shape=clips.shape[1:], message="")
    table = long_run.where("step = 3 AND sample = 0").best(5)
    shown = {card.prompt: card.picture for card in cards(long_run, table, data=data.refresh())}
    strip = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown.pop("always").split(",")[1]))))
    assert strip.shape == (4, 4 * 4 + 3, 3)
    for place, frame in enumerate((0, 2, 4, 6)):
        np.testing.assert_array_equal(strip[:, 5 * place : 5 * place + 4], clips[0, frame])
    assert set(shown.values()) == {""}, "a prompt that is not in the data has what its sample has"


def test_large_pictures_are_made_small(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (1024, 512), "teal").save(buffer, format="PNG")
    store = FeatureStore.create(tmp_path / "experience")
    with store.writer(message="large") as writer:
        for key, blob in (("good", buffer.getvalue()), ("broken", b"not a picture"), ("none", None)):
            writer.add(
                key,
                blob=blob,
                kind="eval",
                stage="image",
                direction="image",
                step=1,
                prompt_key="p",
                sample=0,
                prompt="a",
                target="a",
                response="",
                reward=1.0,
            )
    scores = Scores.open(tmp_path)
    broken, good, none = cards(scores, scores.best(3))
    assert (broken.picture, none.picture) == ("", "")
    assert Image.open(io.BytesIO(base64.b64decode(good.picture.split(",")[1]))).size == (192, 96)
    contact_sheet(scores, scores.best(3)).savefig(io.BytesIO(), format="png")


def test_a_contact_sheet_shows_every_sample_with_words_and_verdict(scores: Scores) -> None:
    table = scores.where("stage = 'text' and direction = 'text'").worst(5)
    figure = contact_sheet(scores, table, columns=3)
    shown = [axes for axes in figure.axes if axes.get_images()]
    assert len(figure.axes) == 6 and len(shown) == 5
    title = shown[0].get_title(loc="left")
    assert f"wrote: {table['response'][0].as_py()}" in title
    assert "judge: " in title and "reward" in title


def test_an_empty_sheet_is_an_empty_figure(scores: Scores) -> None:
    figure = contact_sheet(scores, scores.where("step = 999").best(3))
    assert not any(axes.get_images() for axes in figure.axes)
