"""`unirl reward serve` in a process of its own, and what asks it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from unirl.cli import main
from unirl.rewards import PreferencePair, Question, VlmConfig, read_pairs, write_pairs
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import build_model, build_tokenizer
from unirl.types import Sample

TOKEN = "let me in"
RUN = "from unirl.cli import main; main()"
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained toy model with its question; its answers still differ from picture to picture."""
    directory, question = tmp_path_factory.mktemp("reward"), Question()
    tokenizer = build_tokenizer(question, ["a picture"])
    config = VlmConfig(width=32, num_layers=1, mlp_width=32, vision_width=32, vision_layers=1)
    model = build_model(config, tokenizer, question=question, seed=0).eval()
    QuestionModel(model, tokenizer, question).save(directory)
    question.save(directory)
    return directory


@pytest.fixture
def url(reward: Path, tmp_path: Path) -> Iterator[str]:
    command = [sys.executable, "-c", RUN, "reward", "serve", str(reward), "--port", "0"]
    environment = {
        **os.environ,
        "UNIRL_REWARD_TOKEN": TOKEN,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/v1", process.stdout.readline())
            assert found is not None, (tmp_path / "server.log").read_text()
            yield found.group()
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_a_served_reward_labels_pairs_as_it_does_in_process(reward: Path, url: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    pictures = np.random.default_rng(0).integers(0, 256, (6, 2, 32, 32, 3), dtype=np.uint8)
    pairs = []
    for number, two in enumerate(pictures):
        first, second = (
            Sample(key=f"{number}", direction="image", caption="a picture", image=picture, target="a picture")
            for picture in two
        )
        pairs.append(PreferencePair(pair=f"p{number}", first=first, second=second))
    write_pairs(pairs, tmp_path / "pairs")

    asked = ("--endpoint", url, "--token-file", tmp_path / "token", "--question", reward)
    for out, how in (("over", asked), ("here", ("--model", reward))):
        with pytest.raises(SystemExit) as ended:
            main(["reward", "label", str(tmp_path / "pairs"), "--out", str(tmp_path / out), *map(str, how)])
        assert not ended.value.code
    over, here = ([pair.label for pair in read_pairs(tmp_path / out)] for out in ("over", "here"))
    assert over == here and set(over) == {"first", "second"}
