"""Settings of a run's distribution that one process can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

SPARING = (
    *("--set", "distribution.checkpoint_activations=true"),
    *("--set", "distribution.offload_reference=true"),
)

ToyRun = Callable[..., tuple[int | None, str]]


def test_computing_layers_twice_and_moving_the_reference_change_nothing(
    toy_run: ToyRun, whole_run: Path, toy: SimpleNamespace, tmp_path: Path
) -> None:
    code, said = toy_run(tmp_path / "run", *SPARING)
    assert code == 0, said
    assert toy.metrics_of(tmp_path / "run") == toy.metrics_of(whole_run)
    for name, value in toy.weights_of(tmp_path / "run").items():
        assert torch.equal(value, toy.weights_of(whole_run)[name]), name


def test_bf16_computes_in_bfloat16_and_keeps_weights_in_float32(
    toy_run: ToyRun, whole_run: Path, toy: SimpleNamespace, tmp_path: Path
) -> None:
    code, said = toy_run(tmp_path / "run", "--set", "distribution.mixed_precision=bf16", *SPARING)
    assert code == 0, said
    first = next(line for line in toy.metrics_of(tmp_path / "run") if line["kind"] == "train")
    # The engine computes in float32, policy and reference do not.
    assert abs(first["kl/reference"]) < 1e-3
    assert 1e-6 < first["rollout/logprob_gap_max"] < 0.1
    weights, others = toy.weights_of(tmp_path / "run"), toy.weights_of(whole_run)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert any(not torch.equal(value, others[name]) for name, value in weights.items())


def test_fp16_on_a_cpu_is_refused(toy_run: ToyRun, tmp_path: Path) -> None:
    code, said = toy_run(tmp_path / "run", "--set", "distribution.mixed_precision=fp16")
    assert code != 0
    assert "fp16 with its scaled loss needs a GPU, and this is a CPU; take bf16 or no" in said


def test_one_process_has_nothing_to_shard(
    toy_run: ToyRun, whole_run: Path, toy: SimpleNamespace, tmp_path: Path
) -> None:
    code, said = toy_run(tmp_path / "run", "--set", "distribution.sharding=fsdp2")
    assert code == 0, said
    assert toy.metrics_of(tmp_path / "run") == toy.metrics_of(whole_run)
