"""On one rank; several ranks are tested in tests/integration/test_two_ranks.py."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from unirl.trainer.distributed import gather_rows, global_count, global_moments, reduce_metrics


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_one_rank_is_its_own_sum(accelerator: Accelerator) -> None:
    values, mask = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]])
    moments = global_moments(accelerator, values, mask)
    assert (float(moments.count), float(moments.mean), float(moments.var)) == (2.0, 1.5, 0.5)
    assert global_count(accelerator, mask) == 2.0
    assert gather_rows(accelerator, [1, "two"]) == [1, "two"]
    metrics = reduce_metrics(accelerator, {"a/x_sum": torch.tensor(2.0), "a/y_max": torch.tensor(3.0)})
    assert {name: float(value) for name, value in metrics.items()} == {"a/x_sum": 2.0, "a/y_max": 3.0}


def test_an_update_without_tokens_has_a_denominator_to_divide_by(accelerator: Accelerator) -> None:
    assert global_count(accelerator, torch.zeros(2, 3, dtype=torch.bool)) == 1.0
