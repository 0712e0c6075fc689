from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import unirl.rewards.from_store as from_store
from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.rewards import VlmConfig
from unirl.rewards.from_store import pictures_of, train_from_store
from unirl.rewards.question_model import QuestionModel

TINY = VlmConfig(width=32, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=32, vision_width=32)
CAPTIONS = ["a dark picture", "a grey picture", "a light picture"]


def png(value: int, size: int = 16) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with FeatureStore.create(tmp_path / "store").writer(message="pictures") as writer:
        for number in range(60):
            held_out = number % 3 == 2
            writer.add(
                f"{number:03d}", png(100 * (number % 3) + 20), caption=CAPTIONS[number % 3], held_out=held_out
            )
        writer.add("words", caption="words alone", held_out=False)
        writer.add("silent", png(0), caption=None, held_out=False)
    return tmp_path / "store"


def test_the_model_knows_words_of_rows_that_it_was_not_trained_on(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}
    pairs = from_store.caption_pairs

    def spy(pictures: np.ndarray, captions: list[str], **options: object) -> object:
        asked[len(pictures)] = (set(captions), options["avoid"])
        return pairs(pictures, captions, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(from_store, "caption_pairs", spy)
    report = train_from_store(
        store,
        tmp_path / "reward",
        where="not held_out",
        image_size=(16, 16),
        steps=2,
        batch_size=8,
        config=TINY,
        progress=False,
    )
    assert report.num_held_out == 800
    assert asked.keys() == {4, 36}
    assert asked[36] == (set(CAPTIONS[:2]), {CAPTIONS[2], "words alone"})
    vocabulary = QuestionModel.load(tmp_path / "reward").tokenizer.get_vocab()
    assert {"light", "words", "alone"} <= vocabulary.keys()


def test_pictures_are_those_of_the_rows_in_their_order(store: Path) -> None:
    view = FeatureStore.open(store).select("bytes is not null", order_by="key desc", limit=3)
    pictures = pictures_of(view, (8, 8))
    assert pictures.shape == (3, 8, 8, 3)
    assert pictures[:, 0, 0, 0].tolist() == [0, 220, 120]


def test_a_condition_that_leaves_nothing_is_an_error(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0 pictures with a caption where key = 'none'"):
        train_from_store(store, tmp_path / "reward", where="key = 'none'", steps=1)
