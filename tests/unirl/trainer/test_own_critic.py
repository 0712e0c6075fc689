"""A critic that shares no layer with the policy: trained, warmed up, saved, resumed and started anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.policies.adapters import add_adapters
from unirl.policies.checkpoints import load_policy
from unirl.policies.critic import OwnCritic
from unirl.trainer.stage_checks import check_stages
from unirl.trainer.stage_run import start_anew
from unirl.trainer.stages import RunSettings, Stage


class Killed(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize("with_lora", [False, True])
def test_it_learns_is_saved_and_goes_on_bit_for_bit(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path, with_lora: bool
) -> None:
    """Two steps of warm-up, in which the critic's trunk moves and the policy does not, then two of both."""
    stage = replace(toy.STAGES[0], steps=4, warmup_steps=0, critic_warmup_steps=2, critic_learning_rate=2e-3)
    settings = replace(toy.SETTINGS, critic="own", checkpoint_every=1)
    seen: list[dict[str, torch.Tensor]] = []

    def trainer(run: Path, *, last: int | None = None) -> object:
        policy = toy.make_policy()
        if with_lora:
            pytest.importorskip("peft", reason="the extra lora is not installed")
            add_adapters(policy.lm, rank=2, seed=0)

        def look(stage: str, done: int, total: int, metrics: object) -> None:
            seen.append({name: p.detach().clone() for name, p in policy.named_parameters()})
            if done == last:
                raise Killed

        return toy.make_trainer(
            run, toy_store, policy=policy, stages=(stage,), settings=settings, on_step=look
        )

    whole = trainer(tmp_path / "whole")
    start = {name: p.detach().clone() for name, p in whole.policy.named_parameters()}
    assert isinstance(whole.policy.critic, OwnCritic)
    assert not any(isinstance(module, OwnCritic) for module in whole.reference.modules())
    whole.train()
    moves = [{n for n, p in step.items() if not p.equal(start[n])} for step in seen]
    trained = {name for name, p in whole.policy.named_parameters() if p.requires_grad}
    for step, moved in enumerate(moves):
        assert moved <= trained
        assert any(name.startswith("lm.") for name in moved) == (step >= 2)
        assert any("lora_" in name for name in moved) == with_lora
    assert {name for name in moves[-1] if name.startswith("critic.")} == {
        name for name in trained if name.startswith("critic.")
    }
    with pytest.raises(Killed):
        trainer(tmp_path / "cut", last=3).train()
    trainer(tmp_path / "cut").train()
    weights, others = toy.weights_of(tmp_path / "whole"), toy.weights_of(tmp_path / "cut")
    assert weights.keys() == others.keys() and all(v.equal(others[name]) for name, v in weights.items())
    assert toy.metrics_of(tmp_path / "cut") == toy.metrics_of(tmp_path / "whole")
    whole.policy.save(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    ids, mask = torch.tensor([[2, 6, 4, 5, 7]]), torch.ones(1, 5, dtype=torch.bool)
    with torch.no_grad():
        said, again = (
            policy(ids, mask, prompt_length=2, direction="text").values for policy in (whole.policy, loaded)
        )
    assert said.any()
    torch.testing.assert_close(again, said, atol=1e-6 if with_lora else 0.0, rtol=0)


def test_anew_it_is_the_policys_trunk_as_it_is_then(toy: SimpleNamespace) -> None:
    policy = toy.make_policy()
    policy.take_critic("own")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    optimizer = torch.optim.AdamW(policy.critic_parameters())
    start_anew(policy, optimizer, Stage(name="s", direction="text", prompts="true", steps=1, carry=()))
    trunk = dict(policy.trunk.named_parameters())
    for name, parameter in policy.critic.trunk.named_parameters():
        assert parameter.equal(trunk[name]), name
    assert not policy.critic.head.value.weight.any()


def test_a_second_model_that_nobody_asks_is_refused() -> None:
    stage = Stage(name="s", direction="text", prompts="true", steps=1, prompts_per_step=8)
    check_stages([stage], RunSettings(critic="own"), world_size=1)
    with pytest.raises(ConfigError, match="critic is 'own', a second model, and no stage's algorithm asks"):
        check_stages([replace(stage, algorithm="grpo")], RunSettings(critic="own"), world_size=1)
    with pytest.raises(ConfigError, match="critic is 'owm'; did you mean 'own'"):
        check_stages([stage], RunSettings(critic="owm"), world_size=1)
