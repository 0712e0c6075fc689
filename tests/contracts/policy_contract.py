"""What every policy must keep to, whichever model it is made of.

Load it with `runpy.run_path`, since the tests are no package. It samples with a plain loop of its own over
the policy's face, so that it holds whatever an engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from unirl.algorithms.sampling import sample_tokens
from unirl.policies.checkpoints import load_policy
from unirl.policies.padding import left_pad
from unirl.policies.policy import Policy, PolicyOutput
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.types import Direction, Prompt, SamplingSettings

DIRECTIONS: tuple[Direction, ...] = ("text", "image")
MAX_WORDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """B rows of samples."""

    direction: Direction
    prompt_length: int
    ids: Tensor
    attention: Tensor
    mask: Tensor
    logprobs: Tensor
    pictures: Tensor | None
    temperature: float

    @property
    def responses(self) -> Tensor:
        return self.ids[:, self.prompt_length :]


@torch.no_grad()
def draw(
    policy: Policy, prompts: Sequence[Prompt], uniforms_PGT: np.ndarray, *, temperature: float = 1.0
) -> Drawn:
    """Sample with a cache, one token at a time."""
    direction = prompts[0].direction
    num_prompts, group, length = uniforms_PGT.shape
    uniforms = torch.from_numpy(uniforms_PGT.reshape(-1, length))
    prompt_ids, prompt_mask = left_pad([policy.prompt_ids(p) for p in prompts], policy.vocabulary.pad)
    prompt_ids, prompt_mask = prompt_ids.repeat_interleave(group, 0), prompt_mask.repeat_interleave(group, 0)
    pictures = policy.pictures(prompts)
    cache = DynamicCache(config=policy.decoder_config)
    rows, ended = num_prompts * group, torch.zeros(num_prompts * group, dtype=torch.bool)
    embeds, attention = policy.embed(prompt_ids, pictures), prompt_mask
    positions = (prompt_mask.long().cumsum(1) - 1).clamp(min=0)
    responses = torch.full((rows, length), policy.vocabulary.pad)
    logprobs, mask = torch.zeros(rows, length), torch.zeros(rows, length, dtype=torch.bool)
    for t in range(length):
        hidden = policy.backbone(embeds, attention_mask=attention, positions=positions, cache=cache)[:, -1]
        ids, chosen = sample_tokens(
            policy.logits(hidden, direction),
            uniforms=uniforms[:, t],
            allowed=policy.allowed_at(direction, t),
            temperature=temperature,
        )
        mask[:, t] = ~ended
        responses[~ended, t], logprobs[~ended, t] = ids[~ended], chosen[~ended]
        if direction == "text":
            ended = ended | (ids == policy.vocabulary.eos)
        embeds, positions = policy.embed(ids[:, None]), positions[:, -1:] + 1
        attention = torch.cat([attention, torch.ones(rows, 1, dtype=torch.bool)], 1)
    return Drawn(
        direction=direction,
        prompt_length=prompt_ids.shape[1],
        ids=torch.cat([prompt_ids, responses], 1),
        attention=torch.cat([prompt_mask, mask], 1),
        mask=mask,
        logprobs=logprobs,
        pictures=pictures,
        temperature=temperature,
    )


@torch.no_grad()
def score(policy: Policy, drawn: Drawn, **replaced: Any) -> PolicyOutput:
    arguments = {
        "input_ids": drawn.ids,
        "attention_mask": drawn.attention,
        "prompt_length": drawn.prompt_length,
        "direction": drawn.direction,
        "temperature": drawn.temperature,
        "pictures": drawn.pictures,
    }
    output: PolicyOutput = policy(**{**arguments, **replaced})
    return output


def random_numbers(policy: Policy, prompts: Sequence[Prompt], group: int = 3) -> np.ndarray:
    length = policy.max_response_length(prompts[0].direction, MAX_WORDS)
    return np.random.default_rng(11).random((len(prompts), group, length))


class PolicyContract:
    """Inherit it and give a fixture `policy` over the toy vocabulary; `prompts` may be replaced."""

    @pytest.fixture(params=DIRECTIONS)
    def prompts(self, request: pytest.FixtureRequest, toy: SimpleNamespace) -> list[Prompt]:
        """4 prompts of unequal length."""
        made: list[Prompt] = toy.make_prompts(request.param)
        return made

    @pytest.mark.parametrize("temperature", [0.7, 1.6])
    def test_its_own_samples_replay(self, policy: Policy, prompts: list[Prompt], temperature: float) -> None:
        drawn = draw(policy, prompts, random_numbers(policy, prompts), temperature=temperature)
        output = score(policy, drawn)
        torch.testing.assert_close(output.logprobs[drawn.mask], drawn.logprobs[drawn.mask], atol=1e-5, rtol=0)
        assert (drawn.logprobs[drawn.mask] <= 0).all() and (drawn.logprobs < -0.1).any()
        shape = drawn.mask.shape
        for values in (output.logprobs, output.entropy, output.values):
            assert values.shape == shape and values.dtype == torch.float32
        most = float(np.log(int(policy.allowed_at(drawn.direction, 0).sum())))
        assert (output.entropy >= -1e-6).all() and (output.entropy <= most + 1e-5).all()

    @pytest.mark.parametrize("guidance", [1.0, 2.5])
    def test_what_the_native_engine_samples_replays(
        self, policy: Policy, prompts: list[Prompt], guidance: float
    ) -> None:
        sampling = SamplingSettings(temperature=0.8, guidance=guidance)
        request = RolloutRequest(
            prompts=prompts,
            group_size=3,
            max_new_tokens=policy.max_response_length(prompts[0].direction, MAX_WORDS),
            sampling=sampling,
            seeds=[(7, p) for p in range(len(prompts))],
        )
        rollout = NativeEngine(policy).rollout(request)
        rows = [policy.unconditional_ids(prompt) for prompt in prompts]
        ids, mask = left_pad(rows, policy.vocabulary.pad)
        with torch.no_grad():
            output = policy(
                rollout.input_ids,
                rollout.attention_mask,
                prompt_length=rollout.prompt_length,
                direction=prompts[0].direction,
                temperature=sampling.temperature,
                guidance=guidance,
                unconditional=(ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)),
                pictures=policy.pictures(prompts),
            )
        chosen = rollout.response_mask
        torch.testing.assert_close(output.logprobs[chosen], rollout.old_logprobs[chosen], atol=1e-5, rtol=0)

    def test_left_padding_changes_nothing(self, policy: Policy, prompts: list[Prompt]) -> None:
        drawn = draw(policy, prompts, random_numbers(policy, prompts))
        pad = torch.full((len(drawn.ids), 5), policy.vocabulary.pad)
        narrow = score(policy, drawn)
        wide = score(
            policy,
            drawn,
            input_ids=torch.cat([pad, drawn.ids], 1),
            attention_mask=torch.cat([torch.zeros_like(pad, dtype=torch.bool), drawn.attention], 1),
            prompt_length=drawn.prompt_length + 5,
        )
        torch.testing.assert_close(wide.logprobs[drawn.mask], narrow.logprobs[drawn.mask], atol=1e-5, rtol=0)

    def test_one_row_is_scored_and_sampled_as_in_company(self, policy: Policy, prompts: list[Prompt]) -> None:
        uniforms = random_numbers(policy, prompts)
        together = draw(policy, prompts, uniforms)
        scored = score(policy, together)
        for p, prompt in enumerate(prompts):
            alone = draw(policy, [prompt], uniforms[p : p + 1, 1:2])
            row = 3 * p + 1
            assert alone.responses[0].equal(together.responses[row])
            torch.testing.assert_close(
                score(policy, alone).logprobs[alone.mask],
                scored.logprobs[row][together.mask[row]],
                atol=1e-5,
                rtol=0,
            )

    def test_dropout_is_off_in_any_mode(self, policy: Policy, prompts: list[Prompt]) -> None:
        policy.train()
        assert not any(module.training for module in policy.modules())
        policy.lm.train()
        drawn = draw(policy, prompts, random_numbers(policy, prompts))
        first, second = score(policy, drawn), score(policy, drawn)
        policy.eval()
        assert first.logprobs.equal(second.logprobs)
        assert first.logprobs.equal(score(policy, drawn).logprobs)

    def test_save_and_load_give_the_same_policy(
        self, policy: Policy, prompts: list[Prompt], tmp_path: Path
    ) -> None:
        with torch.no_grad():
            policy.critic.value.bias.fill_(0.25)
        uniforms = random_numbers(policy, prompts)
        drawn = draw(policy, prompts, uniforms)
        policy.save(tmp_path / "policy")
        loaded = load_policy(tmp_path / "policy")
        before, after = score(policy, drawn), score(loaded, drawn)
        torch.testing.assert_close(after.logprobs, before.logprobs, atol=1e-6, rtol=0)
        assert after.values.equal(before.values) and (after.values == 0.25).all()
        assert draw(loaded, prompts, uniforms).ids.equal(drawn.ids)

    def test_weights_are_what_a_plain_model_of_the_class_holds(self, policy: Policy, tmp_path: Path) -> None:
        """The names that an engine is given: none missing, none left over, a tied head twice."""
        policy.save(tmp_path)
        plain = type(policy.lm).from_pretrained(tmp_path, dtype=torch.float32)
        weights = dict(policy.weights())
        assert weights.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(value, weights[name], atol=1e-6, rtol=0)

    def test_the_grammar_holds_whatever_the_model_prefers(
        self, policy: Policy, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ids that are allowed nowhere get the largest logits; 500 random rollouts hold none of them."""
        direction = prompts[0].direction
        allowed, logits = policy.allowed(direction), policy.logits
        never = ~(allowed.any(0) if allowed.ndim == 2 else allowed)
        monkeypatch.setattr(policy, "logits", lambda hidden, d: logits(hidden, d) + 1e4 * never)
        length = policy.max_response_length(direction, MAX_WORDS)
        uniforms = np.random.default_rng(0).random((len(prompts), 500 // len(prompts), length))
        drawn = draw(policy, prompts, uniforms)
        assert len(drawn.ids) == 500 and drawn.logprobs.isfinite().all()
        table = allowed if allowed.ndim == 2 else allowed.expand(length, -1)
        assert table[torch.arange(length), drawn.responses][drawn.mask].all()
        if direction == "image":
            codes = policy.vocabulary.codes(drawn.responses)
            assert drawn.mask.all() and codes.shape == (500, policy.vocabulary.grid.length)
            again = [policy.vocabulary.drawing(row) for row in codes[:20].tolist()]
            assert torch.tensor(again).equal(drawn.responses[:20])
            return
        ended = (drawn.responses == policy.vocabulary.eos) & drawn.mask
        lengths = drawn.mask.sum(1)
        assert (ended.sum(1) <= 1).all()
        assert drawn.mask.equal(torch.arange(length) < lengths[:, None])
        assert (ended.any(1) | (lengths == length)).all()

    def test_the_prompt_without_its_conditions(self, policy: Policy, prompts: list[Prompt]) -> None:
        """The same for captions of one length, scored without trouble, and unlike the prompt."""
        unconditional = [policy.unconditional_ids(prompt) for prompt in prompts]
        assert len({tuple(ids) for ids in unconditional}) <= len({len(policy.prompt_ids(p)) for p in prompts})
        ids, mask = left_pad(unconditional, policy.vocabulary.pad)
        drawn = draw(policy, prompts, random_numbers(policy, prompts, group=1))
        output = score(
            policy,
            drawn,
            input_ids=torch.cat([ids, drawn.responses], 1),
            attention_mask=torch.cat([mask, drawn.mask], 1),
            prompt_length=ids.shape[1],
            pictures=None,
        )
        gap = (output.logprobs - score(policy, drawn).logprobs)[drawn.mask].abs().max()
        assert output.logprobs[drawn.mask].isfinite().all() and gap > 1e-4
