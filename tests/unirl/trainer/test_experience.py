from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from storage import FeatureStore
from unirl.policies.image_tokenizer import uint8_from_pixels
from unirl.trainer.experience import ExperienceLog

COLUMNS = {
    *("key", "kind", "stage", "direction", "step", "policy_version", "prompt_key", "prompt", "target"),
    *("response", "sample", "reward", "reward/likes", "reward/constant", "judge", "advantage", "kl"),
    *("num_tokens", "truncated"),
}


@pytest.fixture(scope="module")
def experience(finished_run: Path) -> FeatureStore:
    return FeatureStore.open(finished_run / "experience")


def test_rows_hold_what_the_documentation_says(experience: FeatureStore) -> None:
    assert set(experience.columns) >= COLUMNS
    assert {name: (str(dtype), shape) for name, (dtype, shape) in experience.tensor_columns.items()} == {
        "tokens": ("int32", (4,)),
        "logprobs": ("float32", (4,)),
        "advantages": ("float32", (4,)),
    }
    assert experience.verify().ok


def test_every_sample_has_one_row_under_its_name(experience: FeatureStore) -> None:
    keys = set(experience.select().keys())
    train = {
        f"train/{stage}/{step:06d}/{prompt:04d}/{sample:03d}"
        for stage, steps in (("text", (1, 2, 3)), ("image", (4, 5, 6)))
        for step in steps
        for prompt in range(4)
        for sample in range(2)
    }
    evaluations = {
        f"eval/{name}/{direction}/{step:06d}/{prompt:04d}/000"
        for name, step in (("start", 0), ("text", 3), ("image", 6))
        for direction in ("text", "image")
        for prompt in range(8)
    }
    assert keys == train | evaluations


def test_tokens_logprobs_and_credit_of_a_row(experience: FeatureStore, toy: SimpleNamespace) -> None:
    vocabulary = toy.make_vocabulary()
    view = experience.select("kind = 'train'")
    tensors = {name: experience.tensor(name).gather(view.rows) for name in experience.tensor_columns}
    for i, row in enumerate(view.to_arrow().to_pylist()):
        n = row["num_tokens"]
        tokens = tensors["tokens"][i]
        assert 1 <= n <= 4
        assert not tokens[n:].any() and not tensors["logprobs"][i, n:].any()
        assert (tensors["logprobs"][i, :n] < 0).all()
        assert row["advantage"] == pytest.approx(float(tensors["advantages"][i, :n].mean()), abs=1e-6)
        assert row["judge"] is None or np.isnan(row["judge"])
        assert row["policy_version"] == row["step"] - 1
        if row["direction"] == "text":
            assert row["response"] == vocabulary.text(tokens[:n].tolist())
            assert row["truncated"] == (tokens[n - 1] != vocabulary.eos)
            assert row["prompt"] == "what does the picture show?"
        else:
            assert (tokens >= vocabulary.grid.offset).all() and n == 4
            assert row["response"] == "" and not row["truncated"]
            assert row["prompt"] == row["target"]


def test_the_picture_of_a_row_is_the_one_that_was_judged(
    experience: FeatureStore, toy: SimpleNamespace
) -> None:
    tokenizer, vocabulary = toy.make_tokenizer(), toy.make_vocabulary()
    for direction in ("text", "image"):
        view = experience.select(f"kind = 'train' and direction = '{direction}'")[:4]
        tokens = experience.tensor("tokens").gather(view.rows)
        for row, record, ids in zip(view.rows, view.to_arrow().to_pylist(), tokens, strict=True):
            with Image.open(io.BytesIO(experience.blob(int(row)))) as image:
                assert image.format == "PNG"
                pixels = np.asarray(image)
            if direction == "text":
                number = int(record["prompt_key"].split("/")[1])
                assert (pixels == toy.picture(number)).all()
            else:
                codes = torch.from_numpy(ids[None].astype(np.int64)) - vocabulary.grid.offset
                assert (pixels == uint8_from_pixels(tokenizer.decode(codes))[0]).all()


def test_rewards_of_rows_and_the_curve_agree(
    finished_run: Path, toy: SimpleNamespace, experience: FeatureStore
) -> None:
    for line in toy.metrics_of(finished_run):
        if line["kind"] == "train":
            view = experience.select(f"kind = 'train' and step = {line['step']}")
            rewards = np.array(view.column("reward").to_pylist())
            assert line["reward/mean"] == pytest.approx(float(rewards.mean()))
            lengths = np.array(view.column("num_tokens").to_pylist())
            assert line["rollout/length"] == pytest.approx(float(lengths.mean()))
        else:
            where = f"kind = 'eval' and stage = '{line['stage']}' and direction = '{line['direction']}'"
            judged = np.array(experience.select(where).column("judge").to_pylist())
            assert line["eval/judge"] == pytest.approx(float(judged.mean()))


def make_row(key: str) -> dict[str, object]:
    empty = np.zeros(0)
    return {
        "key": key, "blob": b"png", "kind": "train", "reward": 0.5, "reward/likes": float("nan"),
        "judge": float("nan"), "advantage": 0.0, "kl": 0.0, "num_tokens": 2, "truncated": False,
        "tokens": np.array([3, 4]), "logprobs": np.array([-1.0, -2.0]), "advantages": empty,
    }  # fmt: skip


def test_one_commit_a_step_and_a_mark_for_the_checkpoint(tmp_path: Path) -> None:
    log = ExperienceLog(tmp_path / "experience", length=5)
    marks = [log.snapshot_id]
    for step in (1, 2):
        log.write([make_row(f"{step}/a"), make_row(f"{step}/b")], message=f"step {step}")
        marks.append(log.snapshot_id)
    assert marks == [0, 1, 2]
    store = FeatureStore.open(tmp_path / "experience")
    assert store.tensor("tokens")[0:1].tolist() == [[3, 4, 0, 0, 0]]
    assert [snapshot.message for snapshot in store.snapshots()][-1] == "step 2"


def test_restore_forgets_what_came_later_and_takes_it_again(tmp_path: Path) -> None:
    log = ExperienceLog(tmp_path / "experience", length=2)
    log.write([make_row("1/a")], message="step 1")
    mark = log.snapshot_id
    log.write([make_row("2/a")], message="step 2")
    resumed = ExperienceLog(tmp_path / "experience", length=2)
    resumed.restore(mark)
    assert FeatureStore.open(tmp_path / "experience").select().keys() == ["1/a"]
    resumed.write([make_row("2/a"), make_row("2/b")], message="step 2 again")
    assert FeatureStore.open(tmp_path / "experience").select().keys() == ["1/a", "2/a", "2/b"]


def test_restore_to_where_it_is_writes_nothing(tmp_path: Path) -> None:
    log = ExperienceLog(tmp_path / "experience", length=2)
    log.write([make_row("1/a")], message="step 1")
    log.restore(log.snapshot_id)
    assert len(FeatureStore.open(tmp_path / "experience").snapshots()) == 2


def test_a_component_that_is_nowhere_scored_stays_a_number_column(tmp_path: Path) -> None:
    log = ExperienceLog(tmp_path / "experience", length=2)
    log.write([make_row("1/a")], message="step 1")
    assert FeatureStore.open(tmp_path / "experience").columns["reward/likes"] == "DOUBLE"


def test_a_store_whose_making_was_killed_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "experience" / "snapshots").mkdir(parents=True)
    log = ExperienceLog(tmp_path / "experience", length=2)
    log.write([make_row("1/a")], message="step 1")
    assert FeatureStore.open(tmp_path / "experience").select().keys() == ["1/a"]
