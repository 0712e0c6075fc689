"""One batch, accumulated, and packed under a budget of tokens: the same gradient, in float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from unirl.algorithms import mean_metrics
from unirl.policies.token_lm import TokenLM
from unirl.trainer.row_batches import (
    budgeted_batches,
    every_nth_prompt,
    join_experiences,
    join_rollouts,
    replay_rollouts,
    row_lengths,
    take_experience,
    take_rollout,
)
from unirl.trainer.stages import Stage
from unirl.trainer.update import update_policy
from unirl.types import Experience, Rollout, SamplingSettings, Scores, TokenOrigin

STAGE = Stage(
    name="s",
    direction="text",
    prompts="true",
    steps=1,
    updates_per_step=1,
    max_grad_norm=1e9,
    entropy_coef=0.01,
    kl_in="loss",
    kl_coef=0.1,
    max_words=47,
)
LENGTHS = ((3, 47), (9, 2), (5, 1), (14, 30), (3, 3), (4, 40), (8, 1), (3, 5))


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture
def policy(toy: SimpleNamespace) -> TokenLM:
    policy = toy.make_policy(seed=2).double()
    with torch.no_grad():
        policy.critic.value.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return policy


def experience_of(
    toy: SimpleNamespace, policy: TokenLM, lengths: tuple[tuple[int, int], ...] = LENGTHS, *, seed: int = 0
) -> Experience:
    """Rows of random words with prompts and responses of given lengths; row 1 could not be scored."""
    generator = torch.Generator().manual_seed(seed)
    prompt, response = (max(column) for column in zip(*lengths, strict=True))
    words = policy.allowed("text").nonzero().flatten()
    shape = (len(lengths), response)

    def random(scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    ids = words[torch.randint(len(words), (shape[0], prompt + response), generator=generator)]
    columns = torch.arange(prompt + response)
    mask = torch.stack([(columns >= prompt - p) & (columns < prompt + r) for p, r in lengths])
    ids = ids.masked_fill(~mask, policy.vocabulary.pad)
    valid = mask[:, prompt:]
    with torch.no_grad():
        logprobs = policy(ids, mask, prompt_length=prompt, direction="text").logprobs
        logprobs = torch.where(valid, logprobs, 0.0)
    loss_mask = valid.clone()
    loss_mask[1] = False
    return Experience(
        rollout=Rollout(
            prompts=toy.make_prompts("text", 4) * 2,
            group_size=1,
            input_ids=ids,
            attention_mask=mask,
            prompt_length=prompt,
            response_mask=valid,
            old_logprobs=logprobs,
            truncated=torch.zeros(shape[0], dtype=torch.bool),
            origin=TokenOrigin.constant(
                shape, direction="text", sampling=SamplingSettings(), policy_version=0
            ),
        ),
        scores=Scores(total=np.arange(len(lengths), dtype=np.float64)),
        old_logprobs=(logprobs + random(0.2)) * valid,
        ref_logprobs=(logprobs + random(0.2)) * valid,
        old_values=random(0.1) * valid,
        loss_mask=loss_mask,
        advantages=random() * loss_mask,
        returns=random() * loss_mask,
    )


def gradients_of(
    accelerator: Accelerator, policy: TokenLM, experiences: list[Experience], **options: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    tokens = options.pop("micro_batch_tokens", 0)
    metrics = update_policy(
        accelerator,
        policy,
        torch.optim.SGD(policy.parameters(), lr=0.0),
        experiences,
        replace(STAGE, **options),
        kl_coef=STAGE.kl_coef,
        micro_batch_tokens=tokens,
    )
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}, (
        mean_metrics(metrics)
    )


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        torch.testing.assert_close(right[name], gradient, atol=1e-9, rtol=0, msg=name)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dr_grpo", "gspo", "drpo"])
def test_one_batch_is_accumulated_is_packed(
    toy: SimpleNamespace, accelerator: Accelerator, policy: TokenLM, algorithm: str
) -> None:
    """Rows of 4 to 50 tokens; the accumulated form has a micro-batch that is masked as a whole."""
    whole = experience_of(toy, policy)
    parts = [take_experience(whole, rows) for rows in ([0, 2, 5], [1], [3, 4], [6, 7])]
    assert not parts[1].loss_mask.any()
    one, metrics = gradients_of(accelerator, policy, [whole], algorithm=algorithm)
    accumulated, _ = gradients_of(accelerator, policy, parts, algorithm=algorithm)
    packed, packed_metrics = gradients_of(
        accelerator, policy, parts, algorithm=algorithm, micro_batch_tokens=64
    )
    assert one["lm.lm_head.weight" if "lm.lm_head.weight" in one else "lm.model.norm.weight"].any()
    assert bool(one["critic.value.weight"].any()) == (algorithm == "ppo")
    assert_same(one, accumulated)
    assert_same(one, packed)
    assert packed_metrics == pytest.approx(metrics, abs=1e-6)


def test_micro_batches_stay_under_the_budget_and_hold_no_needless_padding(
    toy: SimpleNamespace, accelerator: Accelerator, policy: TokenLM
) -> None:
    batches = budgeted_batches(accelerator, [experience_of(toy, policy)], tokens=64, width=32)
    found = [pair for batch in batches for pair in row_lengths(batch.rollout)]
    assert sorted(found) == sorted(LENGTHS)
    for batch in batches:
        rows, columns = batch.rollout.input_ids.shape
        assert rows == 1 or rows * columns <= 64
        pairs = row_lengths(batch.rollout)
        assert columns == max(p for p, _ in pairs) + max(r for _, r in pairs)


def test_rows_that_are_taken_and_joined_again_are_the_same_rows(
    toy: SimpleNamespace, policy: TokenLM
) -> None:
    whole = experience_of(toy, policy)
    joined = join_experiences([take_experience(whole, rows) for rows in ([2, 6], [1, 4, 7], [0, 3, 5])])
    back = take_experience(joined, [5, 2, 0, 6, 3])
    order = [0, 1, 2, 3, 4]
    assert back.rollout.input_ids.shape == whole.rollout.input_ids[order].shape
    for field in ("input_ids", "attention_mask", "response_mask", "old_logprobs", "truncated"):
        assert getattr(back.rollout, field).equal(getattr(whole.rollout, field)[order]), field
    for field in ("old_logprobs", "ref_logprobs", "old_values", "loss_mask", "advantages", "returns"):
        assert getattr(back, field).equal(getattr(whole, field)[order]), field
    assert [p.key for p in back.rollout.prompts] == [whole.rollout.prompts[row].key for row in order]
    assert back.scores.total.tolist() == order


def test_groups_stay_groups_when_rollouts_are_joined(toy: SimpleNamespace, policy: TokenLM) -> None:
    rollout = replace(experience_of(toy, policy).rollout, group_size=2, prompts=toy.make_prompts("text", 4))
    joined = join_rollouts([rollout, rollout])
    assert joined.group_size == 2 and len(joined.prompts) == 8 and len(joined.input_ids) == 16
    singles = join_rollouts([rollout, take_rollout(rollout, [3])])
    assert singles.group_size == 1
    assert [p.key for p in singles.prompts] == ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3", "p1"]


def test_every_nth_prompt_takes_its_scores_along(toy: SimpleNamespace, policy: TokenLM) -> None:
    whole = experience_of(toy, policy)
    picked = every_nth_prompt(whole, 1, 3)
    assert picked.scores.total.tolist() == [1, 4, 7]
    assert picked.advantages.equal(whole.advantages[[1, 4, 7]])


@pytest.mark.parametrize("tokens", [0, 64, 10_000])
def test_scored_in_any_micro_batches_the_log_probs_are_the_same(
    toy: SimpleNamespace, accelerator: Accelerator, policy: TokenLM, tokens: int
) -> None:
    whole = experience_of(toy, policy).rollout
    rollouts = [take_rollout(whole, rows) for rows in ([0, 1], [2, 6], [3, 4, 5, 7])]
    with torch.no_grad():
        outputs = replay_rollouts(accelerator, policy, policy, rollouts, SamplingSettings(), tokens=tokens)
    for rollout, output in zip(rollouts, outputs, strict=True):
        mask = rollout.response_mask
        assert output.logprobs.shape == output.values.shape == mask.shape
        torch.testing.assert_close(output.logprobs[mask], rollout.old_logprobs[mask], atol=1e-10, rtol=0)


class Ranks(Accelerator):
    """Says that it is one of several ranks, whose rows are given."""

    def __init__(self, rank: int, rows: list[Experience]) -> None:
        super().__init__(cpu=True)
        self.rank, self.rows = rank, rows

    @property
    def num_processes(self) -> int:
        return len(self.rows)

    @property
    def process_index(self) -> int:
        return self.rank


def test_ranks_get_equal_work_and_equally_many_micro_batches(
    toy: SimpleNamespace, policy: TokenLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank holds all the long rows. Together the ranks hold every row once, and copies that count not."""
    rows = [experience_of(toy, policy, ((3, 45),) * 8), experience_of(toy, policy, ((3, 3),) * 8, seed=1)]
    monkeypatch.setattr("unirl.trainer.row_batches.gather_rows", lambda ranks, mine: gathered(ranks, mine))

    def gathered(ranks: Ranks, mine: list[Any]) -> list[Any]:
        return mine if isinstance(mine[0], str) else ranks.rows

    shares = [
        budgeted_batches(Ranks(rank, rows), [mine], tokens=96, width=32) for rank, mine in enumerate(rows)
    ]
    assert len(shares[0]) == len(shares[1])
    counted = [sum(int(batch.loss_mask.sum()) for batch in share) for share in shares]
    assert sum(counted) == 7 * 45 + 7 * 3
    long_rows = [[int((b.rollout.response_mask.sum(1) == 45).sum()) for b in share] for share in shares]
    assert [sum(counts) for counts in long_rows] == [4, 4]
