"""What the trainer benchmark compares does the same work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.bench.trainer import PARTS, step_rows, update_rows
from tools.bench.trainer_data import make_data
from tools.bench.trainer_libraries import bare_loop, ours
from tools.bench.trainer_libraries.rows import PROMPT_LENGTH, read_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer") / "data"
    make_data(folder, response_length=6, longest=24)
    return folder


def test_padding_is_no_token(data: Path) -> None:
    even, tails = read_rows(data / "even.npz"), read_rows(data / "tails.npz")
    assert even.num_tokens == 64 * (PROMPT_LENGTH + 6)
    assert tails.ids.shape == (64, PROMPT_LENGTH + 24)
    assert tails.num_tokens < 64 * (PROMPT_LENGTH + 24)
    assert bool((tails.ids[:, PROMPT_LENGTH:][~tails.response_mask] == 0).all())


@pytest.mark.parametrize("rows", ["even", "tails"])
def test_bare_loop_and_trainer_come_to_one_gradient(data: Path, tmp_path: Path, rows: str) -> None:
    bare = bare_loop.Update(data, tmp_path / "bare", rows=rows)
    mine = ours.Update(data, tmp_path / "ours", rows=rows, budget=256 if rows == "tails" else 0)
    for number in range(2):
        one, other = bare.run(number), mine.run(number)
        assert one["tokens"] == other["tokens"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_another_loss_is_noticed() -> None:
    answer = {"seconds": 1.0, "tokens": 10, "grad_norm": 0.5, "bytes": 10}
    rows = update_rows({"ours": [answer], "bare_loop": [answer]}, 6)
    assert [row.ratio for row in rows] == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="same loss"):
        update_rows({"ours": [answer], "bare_loop": [{**answer, "grad_norm": 0.6}]}, 6)


def test_orchestration_is_what_is_left_of_a_step() -> None:
    answer = {"seconds": 2.0, **dict.fromkeys(PARTS, 0.39)}
    *_, share = step_rows({"ours": [answer]}, 6)
    assert np.isclose(share.value, 0.025) and share.holds
