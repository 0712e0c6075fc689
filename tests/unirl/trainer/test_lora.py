from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from storage import FeatureStore
from unirl.policies.adapters import add_adapters
from unirl.policies.reference import BaseReference
from unirl.policies.token_lm import TokenLM

pytest.importorskip("peft", reason="the extra lora is not installed")


def with_adapters(toy: SimpleNamespace) -> TokenLM:
    policy: TokenLM = toy.make_policy()
    add_adapters(policy.lm, rank=4, seed=3)
    return policy


def test_stages_train_adapters_and_critic_alone(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    """The reference is the policy without them: at the first step they agree, later they do not."""
    trainer = toy.make_trainer(tmp_path / "run", toy_store, policy=with_adapters(toy))
    assert isinstance(trainer.reference, BaseReference)
    trainer.train()
    start, end = with_adapters(toy), trainer.policy
    moved = {
        name
        for (name, before), (_, after) in zip(start.named_parameters(), end.named_parameters(), strict=True)
        if not before.equal(after)
    }
    assert {name for name in moved if not name.startswith("critic.")} == {
        name for name, _ in start.lm.named_parameters(prefix="lm") if ".lora_" in name
    }
    assert any(name.startswith("critic.") for name in moved)
    kl = [line["kl/reference"] for line in toy.metrics_of(tmp_path / "run") if line["kind"] == "train"]
    assert abs(kl[0]) < 1e-5 and abs(kl[-1]) > 1e-5


def test_a_run_with_adapters_goes_on_where_it_was(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    class Killed(Exception):
        pass

    def kill(stage: str, done: int, total: int, metrics: object) -> None:
        if (stage, done) == ("image", 1):
            raise Killed

    toy.make_trainer(tmp_path / "whole", toy_store, policy=with_adapters(toy)).train()
    cut = toy.make_trainer(tmp_path / "cut", toy_store, policy=with_adapters(toy), on_step=kill)
    with pytest.raises(Killed):
        cut.train()
    toy.make_trainer(tmp_path / "cut", toy_store, policy=with_adapters(toy)).train()
    whole, again = toy.weights_of(tmp_path / "whole"), toy.weights_of(tmp_path / "cut")
    assert whole.keys() == again.keys() and all(value.equal(again[name]) for name, value in whole.items())
    assert toy.metrics_of(tmp_path / "cut") == toy.metrics_of(tmp_path / "whole")
    # The model below the adapters is written once, and the checkpoints hold what is trained.
    assert {name.split("/")[1].split(".")[0] for name in whole if name.startswith("policy/")} == {
        "lm",
        "critic",
    }
    assert all(".lora_" in name for name in whole if name.startswith("policy/lm."))
    files = [list((tmp_path / run / "checkpoints" / "frozen").iterdir()) for run in ("whole", "cut")]
    assert len(files[0]) == 1 and [file.name for file in files[0]] == [file.name for file in files[1]]
