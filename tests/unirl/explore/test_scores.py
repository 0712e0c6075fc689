from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore, StorageError
from unirl.errors import ConfigError
from unirl.explore import Scores


@pytest.fixture
def by_hand(tmp_path: Path) -> Scores:
    """Five judged samples and one that is not, whose agreement can be worked out on paper."""
    store = FeatureStore.create(tmp_path / "experience")
    values = [(0.9, 1.0), (0.5, 1.0), (0.5, 0.0), (0.1, 0.0), (math.nan, 1.0), (0.7, math.nan)]
    with store.writer(message="by hand") as writer:
        for number, (reward, judge) in enumerate(values):
            writer.add(
                f"s{number}",
                kind="eval",
                stage="image",
                step=1,
                direction="image",
                prompt_key="p",
                sample=number,
                reward=reward,
                judge=judge,
            )
    return Scores.open(tmp_path / "experience")


def test_a_run_and_its_store_open_to_the_same_samples(run_dir: Path) -> None:
    run = Scores.open(run_dir)
    assert len(run) == 108
    assert len(Scores.open(run_dir / "experience")) == 108
    assert len(Scores.open(run.store)) == 108


def test_components_and_measures_are_named_as_the_columns(scores: Scores) -> None:
    assert set(scores.components) == {"reward/vlm", "reward/length"}
    assert scores.measures[0] == "reward"
    assert scores.measures[-1] == "judge"


def test_where_takes_names_with_a_slash_unquoted(scores: Scores) -> None:
    low = scores.where("reward/vlm < 0.2 and stage = 'image'").to_arrow()
    every = scores.to_arrow().to_pylist()
    expected = [row["key"] for row in every if row["reward/vlm"] < 0.2 and row["stage"] == "image"]
    assert low["key"].to_pylist() == expected
    assert 0 < low.num_rows < 108


def test_conditions_add_up_and_a_comment_cannot_swallow_the_rest(scores: Scores) -> None:
    both = scores.where("stage = 'text' or stage = 'image' -- both").where("kind = 'eval'")
    assert len(both) == 24
    assert len(scores) == 108


def test_a_query_sees_only_the_kept_samples(scores: Scores) -> None:
    kept = scores.where("kind = 'train'")
    table = kept.query("WITH t AS (SELECT * FROM samples) SELECT count(reward/vlm) AS n FROM t")
    assert table["n"].to_pylist() == [72]


@pytest.mark.parametrize(
    ("condition", "hint"),
    [
        ("rewrd/vlm < 1", "'reward/vlm'"),
        ("stag = 'text'", "'stage'"),
        ("reward <", "columns"),
        (" ", "empty"),
    ],
)
def test_a_wrong_condition_names_the_nearest_column(scores: Scores, condition: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="condition") as caught:
        scores.where(condition)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_summary_agrees_with_numpy_and_counts_what_was_not_scored(scores: Scores) -> None:
    rows = scores.summary(by=("kind", "stage")).to_pylist()
    found = next(
        row
        for row in rows
        if (row["kind"], row["stage"], row["measure"]) == ("train", "text", "reward/length")
    )
    kept = scores.where("kind = 'train' and stage = 'text'").to_arrow(["reward/length"])
    values = kept["reward/length"].to_numpy()
    finite = values[np.isfinite(values)]
    assert found["num"] == len(finite) < len(values) == found["num"] + found["num_unscored"]
    assert found["mean"] == pytest.approx(finite.mean())
    assert found["deviation"] == pytest.approx(finite.std(ddof=1))
    assert found["p90"] == pytest.approx(np.quantile(finite, 0.9))


def test_summary_has_one_row_per_group_and_measure_in_order_of_time(scores: Scores) -> None:
    table = scores.summary(by=("stage",))
    assert table.num_rows == 3 * 4
    assert list(dict.fromkeys(table["stage"].to_pylist())) == ["start", "text", "image"]
    assert scores.summary().num_rows == (1 + 4 + 1 + 4 + 1) * 4


def test_without_columns_all_samples_are_one_group(scores: Scores, by_hand: Scores) -> None:
    assert scores.summary(by=())["num"].to_pylist()[0] == len(scores)
    (row,) = by_hand.agreement(by=()).to_pylist()
    assert row["auc"] == pytest.approx(3.5 / 4)


def test_agreement_is_what_was_worked_by_hand(by_hand: Scores) -> None:
    # Judged and scored: accepted 0.9, 0.5; rejected 0.5, 0.1. 0.9 beats both, 0.5 ties one and beats one.
    (row,) = by_hand.agreement().to_pylist()
    assert (row["first"], row["second"], row["num"]) == ("reward", "judge", 4)
    assert row["auc"] == pytest.approx(3.5 / 4)
    assert row["correlation"] == pytest.approx(np.corrcoef([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0])[0, 1])


def test_agreement_of_constants_and_of_one_verdict_is_null(by_hand: Scores) -> None:
    (row,) = by_hand.where("judge = 1").agreement().to_pylist()
    assert (row["correlation"], row["auc"]) == (None, None)


def test_agreement_covers_every_pair_in_every_stage(scores: Scores) -> None:
    rows = scores.agreement().to_pylist()
    assert len(rows) == 3 * 6
    assert all((row["auc"] is None) == (row["second"] != "judge") for row in rows)


def test_best_and_worst_leave_out_what_was_not_scored(scores: Scores, by_hand: Scores) -> None:
    assert by_hand.best(2)["key"].to_pylist() == ["s0", "s5"]
    assert by_hand.worst(10)["key"].to_pylist() == ["s3", "s1", "s2", "s5", "s0"]
    lengths = scores.worst(200, by="reward/length")["reward/length"].to_pylist()
    assert lengths == sorted(lengths) and all(map(math.isfinite, lengths))
    with pytest.raises(ConfigError, match="did you mean 'reward/vlm'"):
        scores.best(by="reward/vml")


def test_history_follows_a_prompt_through_the_steps(scores: Scores) -> None:
    table = scores.history("p1")
    assert set(table["prompt_key"].to_pylist()) == {"p1"}
    assert table["step"].to_pylist() == sorted(table["step"].to_pylist())
    assert table.num_rows == 36
    with pytest.raises(ConfigError, match="p0, p1, p2"):
        scores.history("p'9")


def test_the_picture_is_the_one_that_was_stored(scores: Scores) -> None:
    picture = scores.picture(scores.best(1)["key"][0].as_py())
    assert (picture.size, picture.mode) == ((24, 12), "RGB")


def test_a_sample_without_a_picture_is_said(by_hand: Scores) -> None:
    with pytest.raises(StorageError, match="'s0'"):
        by_hand.picture("s0")


def test_pandas_is_optional(scores: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(scores.to_pandas(["key", "reward/vlm"])) == 108
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"unirl\[notebook\]"):
        scores.to_pandas()


def test_wrong_places_are_answered_with_what_is_there(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such run.*demo"):
        Scores.open(run_dir.parent / "dem0")
    with pytest.raises(ConfigError, match="no experience in it"):
        Scores.open(tmp_path)
    with pytest.raises(ConfigError, match="not a store of experience"):
        Scores.open(run_dir / "store")


def test_a_run_without_judge_or_components_is_fine(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "experience")
    with store.writer(message="bare") as writer:
        writer.add("s", kind="train", stage="text", step=1, prompt_key="p", reward=1.0)
    scores = Scores.open(tmp_path)
    assert scores.measures == ("reward",)
    assert scores.agreement().num_rows == 0
    assert scores.best(1)["key"].to_pylist() == ["s"]


def test_a_view_of_a_run_stays_on_its_snapshot(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = make_run(tmp_path / "run", steps=1, prompts=1, samples=1)
    before = Scores.open(run)
    num = len(before)
    row = before.to_arrow().to_pylist()[0]
    with FeatureStore.open(run / "experience").writer(message="next step") as writer:
        writer.add(
            "new",
            kind="train",
            stage="text",
            step=99,
            direction="text",
            prompt_key="p0",
            sample=0,
            reward=row["reward"],
        )
    assert (len(before), len(Scores.open(run))) == (num, num + 1)
