"""The FSDP rows: what ranks share, and what they must never wait for. Two gloo processes on a CPU."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from unirl.errors import ConfigError
from unirl.trainer.checkpoint import load_checkpoint
from unirl.trainer.distribution import Distribution
from unirl.trainer.sharding import prepare_policy, require_fit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TWO_RANKS = (
    *("ddp_gradients", "ddp_06", "ddp_own_critic"),
    *("fsdp2_gradients", "fsdp2_own_critic", "fsdp2_checkpointed", "tied_embeddings"),
    *("fsdp_01", "fsdp_03", "fsdp_06", "fsdp_07", "bf16"),
)


def launch(folder: Path, num_ranks: int, checks: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *launcher, str(HERE / "fsdp_ranks.py"), str(folder), *checks],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All checks of `fsdp_ranks.py` in one launch: the folder of what held, and what was said."""
    pytest.importorskip("peft", reason="the extra lora is not installed")
    folder = tmp_path_factory.mktemp("ranks")
    done = launch(folder, 2, TWO_RANKS)
    return folder, f"exit code {done.returncode}\n{done.stderr[-6000:]}"


@pytest.fixture(scope="module")
def toy() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "toy.py")))


def require(two_ranks: tuple[Path, str], check: str) -> None:
    folder, said = two_ranks
    assert (folder / f"{check}.json").is_file(), said


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        *("ddp_gradients", "fsdp2_gradients", "fsdp2_checkpointed", "tied_embeddings"),
        *("ddp_own_critic", "fsdp2_own_critic"),
    ],
)
def test_the_gradient_of_one_batch_is_that_of_two_ranks(two_ranks: tuple[Path, str], check: str) -> None:
    """Actor and critic, float64, responses of 1 to 41 tokens, one micro-batch masked as a whole."""
    require(two_ranks, check)


@pytest.mark.slow
def test_the_gradient_of_one_batch_is_that_of_four_ranks(tmp_path: Path) -> None:
    done = launch(tmp_path, 4, ("ddp_gradients", "fsdp2_gradients"))
    assert done.returncode == 0, done.stderr[-6000:]
    assert (tmp_path / "fsdp2_gradients.json").is_file()


@pytest.mark.slow
def test_bf16_keeps_weights_critic_and_gradients_in_float32(two_ranks: tuple[Path, str]) -> None:
    require(two_ranks, "bf16")


@pytest.mark.slow
def test_fsdp_01_what_was_saved_is_loaded_bit_for_bit(
    two_ranks: tuple[Path, str], toy: SimpleNamespace
) -> None:
    """In the processes that saved it, and here, in one that holds the model whole."""
    require(two_ranks, "fsdp_01")
    folder, _ = two_ranks
    wanted = load_file(folder / "at_3.safetensors")
    prepared = prepare_policy(Accelerator(cpu=True), Distribution(), toy.make_policy(seed=9))
    load_checkpoint(
        folder / "checkpoints" / "step-00000003",
        model=prepared.model,
        optimizer=prepared.optimizer.optimizer,
    )
    for name, parameter in prepared.model.named_parameters():
        assert torch.equal(parameter, wanted.pop(f"policy/{name}"))
        for field, value in prepared.optimizer.state[parameter].items():
            assert torch.equal(value, wanted.pop(f"optimizer/{name}:{field}")), (name, field)
    assert not wanted


@pytest.mark.slow
def test_fsdp_03_frozen_parts_and_dtypes_may_be_mixed_and_change(two_ranks: tuple[Path, str]) -> None:
    require(two_ranks, "fsdp_03")


@pytest.mark.slow
def test_fsdp_06_text_on_one_rank_and_pictures_on_the_other(two_ranks: tuple[Path, str]) -> None:
    require(two_ranks, "fsdp_06")
    require(two_ranks, "ddp_06")


@pytest.mark.slow
def test_fsdp_07_ranks_that_stop_at_different_lengths_do_not_wait(two_ranks: tuple[Path, str]) -> None:
    """Rollouts here; micro-batches under a budget of tokens are part of the gradient checks."""
    require(two_ranks, "fsdp_07")
    require(two_ranks, "fsdp2_gradients")


@pytest.mark.slow
def test_fsdp_08_a_cpu_shards_with_gloo(two_ranks: tuple[Path, str]) -> None:
    """Steps and a checkpoint on two processes without a GPU; the refusals below say what it cannot do."""
    require(two_ranks, "fsdp_01")


class Launched:
    """What `require_fit` asks of an Accelerator."""

    def __init__(self, **changed: object) -> None:
        self.mixed_precision = "no"
        self.device = torch.device("cpu")
        self.distributed_type = SimpleNamespace(value="MULTI_CPU")
        self.is_fsdp2, self.num_processes = False, 2
        self.parallelism_config = None
        self.__dict__.update(changed)


@pytest.mark.parametrize(
    ("launched", "distribution", "said"),
    [
        ({"mixed_precision": "fp16"}, Distribution(mixed_precision="fp16"), "needs a GPU"),
        ({"mixed_precision": "bf16"}, Distribution(), "'no' in the settings and 'bf16' in the launch"),
        ({}, Distribution(sharding="fsdp2"), "sharding is 'fsdp2' in the settings"),
        (
            {"parallelism_config": SimpleNamespace(tp_size=2, cp_size=1, sp_size=1)},
            Distribution(),
            "tp_size 2",
        ),
        (
            {"parallelism_config": SimpleNamespace(tp_size=1, cp_size=4, sp_size=1)},
            Distribution(),
            "cp_size 4",
        ),
    ],
)
def test_fsdp_08_what_cannot_work_is_refused_with_a_reason(
    launched: dict[str, object], distribution: Distribution, said: str
) -> None:
    accelerator: Any = Launched(**launched)
    with pytest.raises(ConfigError, match=said):
        require_fit(accelerator, distribution)
