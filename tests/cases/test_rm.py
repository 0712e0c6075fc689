"""Field cases of rewards; the name of a test begins with the row's id."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unirl.rewards.fake_backend import FakeBackend
from tests.unirl.rewards.user_functions import by_caption
from unirl.errors import ConfigError, RewardError
from unirl.rewards import Pattern, Question, UserReward, VlmConfig, VlmYesNo
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


def test_rm_02_a_no_far_outside_the_top_still_counts(directory: Path) -> None:
    """No lies 30 nats under yes and under five other tokens: the score is below 1, by as much."""
    model = QuestionModel.load(directory)
    yes, no = (int(answer) for answer in model.answers)
    with torch.no_grad():
        model.model.model.language_model.norm.weight.fill_(0.0)
        model.model.lm_head = torch.nn.Linear(32, len(model.tokenizer))
        model.model.lm_head.weight.zero_()
        model.model.lm_head.bias.zero_()
        model.model.lm_head.bias[yes], model.model.lm_head.bias[no] = 10.0, -20.0
    total = VlmYesNo(model.backend(), model.question).score([sample("a")]).total[0]
    assert total < 1.0
    assert np.log1p(-total) == pytest.approx(-30.0, abs=0.01)


def test_rm_02_an_answer_that_a_server_does_not_name_is_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    """No is not among five tokens of which the least likely has 0.01: at most 0.01, so yes at least 0.97."""
    reward = VlmYesNo(FakeBackend(0.4, 0.01, bound=(False, True)), Question())
    assert reward.score([sample("a")]).total[0] == pytest.approx(0.4 / 0.41)
    assert reward.num_bounded == 1
    neither = VlmYesNo(FakeBackend(0.01, 0.01, bound=(True, True)), Question(), max_failed_fraction=1.0)
    assert np.isnan(neither.score([sample("a")]).total).all()
    assert neither.failures == {"no answer": 1}


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_rm_02_a_vocabulary_without_an_answer_is_refused(
    directory: Path, tmp_path: Path, answer: str
) -> None:
    copy = with_question(directory, tmp_path / "copy", **{answer: ["Jawohl", "zebra", ""]})
    with pytest.raises(ConfigError, match=r"'Jawohl'.*is in its vocabulary"):
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
    with pytest.raises(RewardError, match=r"sample 0 \(long\).*it needs 83 tokens, the model takes 64"):
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


def test_rm_04_a_picture_of_more_tokens_than_the_limit_is_an_error(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens is 64, a question with no caption needs 263"):
        VlmYesNo.load(with_question(directory, tmp_path / "copy", image_size=[128, 128]))


@pytest.mark.parametrize(("limit", "fits"), [(44, True), (43, False), (26, False), (24, False)])
def test_rm_04_two_pictures_fit_both_or_the_sample_is_left_out(
    directory: Path, limit: int, fits: bool
) -> None:
    """23 tokens with one picture, 3 of the caption, 18 of the other: a cut at 24 falls between them."""
    model = QuestionModel.load(directory)
    backend = model.backend()
    backend.preparer.max_tokens = limit
    reward = VlmYesNo(backend, model.question, max_failed_fraction=1.0)
    pair = replace(sample("pair"), more_images=(sample("other").image,))
    assert np.isfinite(reward.score([pair]).total[0]) == fits
    assert reward.failures == ({} if fits else {"too long": 1})


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


@pytest.mark.parametrize(
    ("caption", "reason", "words"),
    [
        ("regex", "timed out", r"took over 2 s; it was at .*by_caption"),
        ("hang", "timed out", r"took over 2 s; it was at .*by_caption"),
        ("exit", "exited", r"called sys\.exit\(3\)"),
        ("segfault", "crashed", r"SIGSEGV at .*by_caption"),
    ],
)
def test_rm_09_a_reward_that_hangs_exits_or_crashes_costs_one_sample(
    caplog: pytest.LogCaptureFixture, caption: str, reason: str, words: str
) -> None:
    """A regular expression that takes for ever, a loop, sys.exit and a segmentation fault."""
    reward = UserReward(by_caption, limit_s=2.0)
    with caplog.at_level("WARNING", logger="unirl.rewards"):
        scores = reward.score([sample("a"), sample("bad", caption=caption), sample("c"), sample("d")])
    reward.close()
    np.testing.assert_array_equal(scores.total, [1.0, np.nan, 1.0, 1.0])
    assert reward.failures == {reason: 1}
    assert re.search(rf"sample 1 \(bad\): {words}", caplog.text)


def test_rm_09_a_pattern_of_the_library_gives_up_by_itself() -> None:
    reward = Pattern(r"(a|aa)+$")
    scores = reward.score([sample("a", caption="aaa"), sample("b", caption="a" * 40 + "b")])
    np.testing.assert_array_equal(scores.total, [1.0, np.nan])
    assert reward.failures == {"pattern time": 1}
