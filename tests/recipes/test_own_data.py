"""The recipe for a store of one's own: what is held out, what is asked of the data, and who judges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recipes.own_data import CaptionJudge, OwnData, own_data
from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.trainer.clone import HasStore
from unirl.types import Sample, Scores


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    """Pictures, a picture without words, and prompts without a picture."""
    store = FeatureStore.create(tmp_path / "store")
    with store.writer(message="mine") as writer:
        for number in range(400):
            writer.add(f"p/{number}", blob=b"bytes", caption=f"picture {number % 7}")
        for number in range(100):
            writer.add(f"q/{number}", caption=f"prompt {number % 3}")
        writer.add("silent", blob=b"bytes")
    return store.refresh()


def test_one_row_in_ten_is_held_out_of_all_training(store: FeatureStore) -> None:
    recipe = own_data()
    held_out = set(store.select(recipe.evaluation_rows).keys())
    assert 20 < len(held_out) < 60 and all(key.startswith("p/") for key in held_out)
    conditions = [recipe.tokenizer_rows, recipe.warm_up_rows, recipe.reward_rows]
    conditions += [stage.prompts for stage in recipe.stages]
    for condition in conditions:
        assert held_out.isdisjoint(store.select(condition).keys())
    drawn = store.select(recipe.stages[1].prompts).keys()
    assert any(key.startswith("q/") for key in drawn) and "silent" not in drawn
    described = store.select(recipe.stages[0].prompts).keys()
    assert all(key.startswith("p/") for key in described)


def test_the_vocabulary_holds_every_word_of_the_store(store: FeatureStore) -> None:
    data = OwnData(store=str(store.path))
    assert isinstance(data, HasStore)
    assert set(data.captions()) == {f"picture {n}" for n in range(7)} | {f"prompt {n}" for n in range(3)}


def test_data_that_is_not_named_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--store STORE names it"):
        OwnData().store_path()


def test_a_store_without_captions_is_told(tmp_path: Path) -> None:
    FeatureStore.create(tmp_path / "empty")
    with pytest.raises(ConfigError, match="has no captions"):
        OwnData(store=str(tmp_path / "empty")).captions()


def sample(direction: str, caption: str, target: str) -> Sample:
    picture = np.zeros((4, 4, 3), np.uint8)
    return Sample(key="k", direction=direction, caption=caption, image=picture, target=target)  # type: ignore[arg-type]


def test_without_a_model_the_caption_judges_texts_alone() -> None:
    samples = [
        sample("text", "a  cat", "a cat"),
        sample("text", "a dog", "a cat"),
        sample("image", "a cat", "a cat"),
    ]
    np.testing.assert_array_equal(OwnData().judge(seed=0).judge(samples), [1.0, 0.0, np.nan])


def test_a_model_judges_both_by_its_bar() -> None:
    class Model:
        def score(self, samples: list[Sample]) -> Scores:
            return Scores(total=np.array([0.7, 0.2, np.nan]))

    samples = [sample("image", "a", "a")] * 3
    np.testing.assert_array_equal(CaptionJudge(model=Model(), bar=0.5).judge(samples), [1.0, 0.0, np.nan])
