"""Field cases of rewards; the name of a test begins with the row's id."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from unirl.errors import ConfigError, RewardError
from unirl.rewards import Question, VlmConfig, VlmYesNo
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import build_model, build_tokenizer
from unirl.types import Sample


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward")
    question = Question()
    tokenizer = build_tokenizer(question, ["a red circle"])
    config = VlmConfig(width=32, num_heads=2, num_kv_heads=1, vision_width=32)
    model = build_model(config, tokenizer, question=question, seed=0).eval()
    QuestionModel(model, tokenizer, question).save(path)
    question.save(path)
    return path


def sample(key: str, *, rows: int = 32, columns: int = 32, caption: str = "a red circle") -> Sample:
    picture = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    return Sample(key=key, direction="image", caption=caption, image=picture, target="a red circle")


def with_question(directory: Path, copy: Path, **change: object) -> Path:
    shutil.copytree(directory, copy)
    document = json.loads((copy / "reward.json").read_text())
    document["question"].update(change)
    (copy / "reward.json").write_text(json.dumps(document))
    return copy


def test_rm_02_a_no_far_outside_the_top_still_counts(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lies 30 nats under yes and under five other tokens: the score is below 1, by as much."""
    reward = VlmYesNo.load(directory)
    logits = torch.zeros(len(reward.model.tokenizer))
    logits[reward.model.yes_ids] = 10.0
    logits[reward.model.no_ids] = -20.0
    monkeypatch.setattr(reward.model, "logits", lambda features, ids, mask: logits.expand(len(ids), 1, -1))
    total = reward.score([sample("a")]).total[0]
    assert total < 1.0
    assert np.log1p(-total) == pytest.approx(-30.0, abs=0.01)


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_rm_02_a_vocabulary_without_an_answer_is_refused(
    directory: Path, tmp_path: Path, answer: str
) -> None:
    copy = with_question(directory, tmp_path / "copy", **{answer: ["Jawohl", "circle red", ""]})
    with pytest.raises(ConfigError, match=f"'Jawohl'.*spellings of \"{answer}\" in reward.json"):
        VlmYesNo.load(copy)


def test_rm_02_spellings_that_are_missing_or_double_count_once(directory: Path, tmp_path: Path) -> None:
    plain = VlmYesNo.load(with_question(directory, tmp_path / "a", yes=["yes"], no=["no"]))
    many = VlmYesNo.load(
        with_question(directory, tmp_path / "b", yes=["yes", " yes", "YES"], no=["no", "nope"])
    )
    assert plain.score([sample("a")]).total == many.score([sample("a")]).total


def test_rm_04_a_question_over_the_limit_names_sample_limit_and_need(directory: Path) -> None:
    """It is never cut: 23 tokens without the caption and 60 words are 83."""
    reward = VlmYesNo.load(directory)
    with pytest.raises(RewardError, match=r"sample 0 \(long\).*needs 83 tokens, the model takes 64"):
        reward.score([sample("long", caption="red " * 60)])
    mixed = [sample(f"s{row}") for row in range(19)] + [sample("long", caption="red " * 60)]
    scores = reward.score(mixed)
    assert np.isnan(scores.total).tolist() == [False] * 19 + [True]
    assert reward.failures["too long"] == 2


def test_rm_04_the_longest_question_that_fits_is_scored(directory: Path) -> None:
    assert np.isfinite(VlmYesNo.load(directory).score([sample("a", caption="red " * 40)]).total[0])


def test_rm_04_a_limit_inside_the_picture_is_an_error(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens is 12, a question with no caption needs 23"):
        VlmYesNo.load(with_question(directory, tmp_path / "copy", max_tokens=12))


@pytest.mark.parametrize(("columns", "rows"), [(26, 28), (332, 27), (1, 1), (33, 32), (640, 480)])
def test_rm_06_odd_picture_sizes_are_scored(directory: Path, columns: int, rows: int) -> None:
    assert np.isfinite(VlmYesNo.load(directory).score([sample("a", rows=rows, columns=columns)]).total[0])


def test_rm_06_a_picture_beyond_the_limits_is_skipped_with_a_reason(directory: Path) -> None:
    reward = VlmYesNo.load(directory)
    given = [sample(f"s{row}") for row in range(19)] + [sample("thin", rows=17, columns=4000)]
    scores = reward.score(given)
    assert np.flatnonzero(np.isnan(scores.total)).tolist() == [19]
    assert reward.failures == {"picture": 1}
    with pytest.raises(RewardError, match=r"thin\): picture is 4000x17"):
        reward.score([replace(given[-1])])
