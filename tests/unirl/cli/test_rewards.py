"""The way from a run's experience to the next version of its reward, by commands alone."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from storage import FeatureStore
from unirl.cli import main
from unirl.rewards import Preference
from unirl.types import Sample

Unirl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def unirl(capsys: pytest.CaptureFixture[str]) -> Unirl:
    """Call the command line; returns exit code, output and error output."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten prompts with a dark and a light drawing each."""
    fields = {"kind": "train", "direction": "image", "target": "a picture", "response": "", "step": 1}
    with FeatureStore.create(tmp_path / "run" / "experience").writer(
        message="rows", columns={"reward": "float"}
    ) as writer:
        for number in range(20):
            buffer = io.BytesIO()
            level = 20 + number if number % 2 else 200 + number
            Image.new("RGB", (32, 32), (level, level, level)).save(buffer, "PNG")
            prompt = f"prompt {number // 2}"
            writer.add(
                f"{number:02d}", buffer.getvalue(), prompt_key=prompt, reward=(number % 5) / 7, **fields
            )
    return tmp_path / "run"


@pytest.mark.slow
def test_mine_label_and_train_two_versions(unirl: Unirl, run: Path, tmp_path: Path) -> None:
    pairs, first, second = tmp_path / "pairs", tmp_path / "v1", tmp_path / "v2"
    code, said, error = unirl("reward", "mine", run, "--out", pairs, "--by", "uncertainty")
    assert code == 0, error
    assert said.startswith(f"{pairs}/pairs.jsonl: 10 pairs")

    lines = [json.loads(line) for line in (pairs / "pairs.jsonl").read_text().splitlines()]
    light = [np.asarray(Image.open(pairs / line["first"]["image"])).mean() > 100 for line in lines]
    labels = tmp_path / "labels.jsonl"
    labels.write_text(
        "".join(
            json.dumps({"pair": line["pair"], "label": "first" if is_first else "second"}) + "\n"
            for line, is_first in zip(lines, light)
        )
    )
    few = ("--steps", 30, "--batch-size", 8)
    code, said, error = unirl("reward", "train", "--pairs", pairs, "--labels", labels, "--out", first, *few)
    assert code == 0, error
    assert said.startswith(f"{first}: version 1, ") and "on 2 pairs held out" in said

    labelled = ("--out", tmp_path / "labelled", "--json")
    code, said, error = unirl("reward", "label", pairs, "--model", first, *labelled)
    assert code == 0, error
    answer = json.loads(said)
    assert (
        answer["pairs"] == str(tmp_path / "labelled" / "pairs.jsonl") and sum(answer["labels"].values()) == 10
    )
    code, said, error = unirl(
        *("reward", "train", "--pairs", tmp_path / "labelled", "--from", first, "--out", second, *few)
    )
    assert code == 0, error
    assert said.startswith(f"{second}: version 2, ")
    sample = Sample(
        key="k", direction="image", caption="a picture", image=np.zeros((8, 8, 3), np.uint8), target=""
    )
    assert np.isfinite(Preference.load(second).score([sample]).total).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--out", "x"), "name a store, for a yes/no reward, or --pairs, for a preference"),
        (("train", "store", "--pairs", "p", "--out", "x"), "name a store, for a yes/no reward, or --pairs"),
        (("train", "store", "--from", "p", "--out", "x"), "--labels and --from belong to --pairs"),
        (("label", "pairs", "--out", "x"), "name one of --model and --endpoint"),
    ],
)
def test_options_that_do_not_fit_are_told(unirl: Unirl, arguments: tuple[str, ...], words: str) -> None:
    code, _, said = unirl("reward", *arguments)
    assert code == 2
    assert words in said


def test_a_condition_that_leaves_no_pairs_is_told(unirl: Unirl, run: Path, tmp_path: Path) -> None:
    code, _, said = unirl("reward", "mine", run, "--out", tmp_path / "pairs", "--where", "step > 5")
    assert (code, (tmp_path / "pairs").exists()) == (1, False)
    assert "no pairs by 'group' where step > 5" in said
