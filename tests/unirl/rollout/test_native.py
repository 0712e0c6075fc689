from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from unirl.errors import ConfigError, RolloutError
from unirl.policies.token_lm import TokenLM
from unirl.rollout import fused_decoder, native_rows
from unirl.rollout.decoder import Decoder
from unirl.rollout.engine import RolloutRequest, assemble, begin
from unirl.rollout.fused_decoder import FusedDecoder
from unirl.rollout.generic_decoder import GenericDecoder
from unirl.rollout.native import NativeEngine
from unirl.types import Direction, Prompt, Rollout, SamplingSettings

DIRECTIONS = get_args(Direction)
DECODERS = {"fused": lambda p: FusedDecoder(p, dtype=p.dtype), "generic": GenericDecoder}
GUIDED = SamplingSettings(temperature=0.8, guidance=3.0)


@pytest.fixture(scope="module")
def policy(toy: SimpleNamespace) -> TokenLM:
    return toy.make_policy(seed=4)


def request_for(prompts: Sequence[Prompt], group_size: int = 2, length: int = 4, **fields) -> RolloutRequest:
    """Each prompt has the seed that its key says, whatever its company."""
    fields.setdefault("seeds", [(9, int(prompt.key[1:])) for prompt in prompts])
    return RolloutRequest(prompts=prompts, group_size=group_size, max_new_tokens=length, **fields)


def responses(rollout: Rollout) -> list[list[int]]:
    """Each row's real tokens."""
    return [ids[:n] for ids, n in zip(rollout.response_ids.tolist(), rollout.lengths.tolist(), strict=True)]


def assert_same(left: Rollout, right: Rollout) -> None:
    assert responses(left) == responses(right)
    torch.testing.assert_close(left.old_logprobs, right.old_logprobs, atol=1e-5, rtol=0)
    assert left.truncated.equal(right.truncated)


@pytest.mark.parametrize("sampling", [SamplingSettings(), GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_prompt_is_answered_alike_alone_and_in_any_company(
    policy: TokenLM, toy: SimpleNamespace, direction: Direction, sampling: SamplingSettings
) -> None:
    prompts, engine = toy.make_prompts(direction, 6), NativeEngine(policy)
    whole = engine.rollout(request_for(prompts, 3, sampling=sampling))
    for order in ([0], [5, 1], [4, 3, 2, 1, 0]):
        part = engine.rollout(request_for([prompts[p] for p in order], 3, sampling=sampling))
        rows = torch.tensor([3 * p + g for p in order for g in range(3)])
        assert responses(part) == [responses(whole)[row] for row in rows]
        torch.testing.assert_close(part.old_logprobs, whole.old_logprobs[rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampling", [SamplingSettings(), GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("max_rows", [1, 3, 5])
def test_refilled_places_give_what_one_batch_gives(
    policy: TokenLM,
    toy: SimpleNamespace,
    direction: Direction,
    sampling: SamplingSettings,
    decoder: str,
    max_rows: int,
) -> None:
    request = request_for(toy.make_prompts(direction, 4), 3, sampling=sampling)
    whole = NativeEngine(policy).rollout(request)
    engine = NativeEngine(policy, max_rows=max_rows, decoder=DECODERS[decoder](policy))
    continuous = engine.rollout(request)
    assert_same(continuous, whole)
    assert max(continuous.active_rows) == max_rows
    assert sum(continuous.active_rows) == sum(whole.active_rows) == int(whole.response_mask.sum())


def test_a_long_queue_moves_its_cache_to_the_front(policy: TokenLM, toy: SimpleNamespace) -> None:
    """Forty samples through two places: the clock passes the end of the cache again and again."""
    request = request_for(toy.make_prompts("text", 4), 10, length=12)
    assert_same(NativeEngine(policy, max_rows=2).rollout(request), NativeEngine(policy).rollout(request))


@pytest.mark.parametrize("sampling", [SamplingSettings(), GUIDED], ids=["plain", "guided"])
def test_blocks_of_rows_attend_as_all_at_once(
    policy: TokenLM, toy: SimpleNamespace, sampling: SamplingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(toy.make_prompts("text", 4), 10, length=12, sampling=sampling)
    whole = NativeEngine(policy, max_rows=7).rollout(request)
    monkeypatch.setattr(fused_decoder, "BLOCK_ROWS", 2)
    monkeypatch.setattr(fused_decoder, "BLOCKS_PAY", 1.5)
    assert_same(NativeEngine(policy, max_rows=7).rollout(request), whole)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_cache_changes_nothing(policy: TokenLM, toy: SimpleNamespace, direction: Direction) -> None:
    """Each log-prob equals the one of a forward pass without cache over that row alone, unpadded."""
    rollout = NativeEngine(policy).rollout(request_for(toy.make_prompts(direction)))
    for row, ids in enumerate(responses(rollout)):
        prompt = rollout.input_ids[row, : rollout.prompt_length]
        prompt = prompt[rollout.attention_mask[row, : rollout.prompt_length]]
        with torch.no_grad():
            logits = policy.lm(input_ids=torch.cat([prompt, torch.tensor(ids)])[None]).logits[0]
        logits = logits[len(prompt) - 1 : -1].masked_fill(~policy.allowed(direction), -torch.inf)
        expected = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
        torch.testing.assert_close(rollout.old_logprobs[row, : len(ids)], expected, atol=1e-5, rtol=0)


def test_samples_follow_the_distribution(
    policy: TokenLM, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evenly spaced random numbers give each first token as often as its probability says."""
    num = 2000
    monkeypatch.setattr(
        native_rows, "sample_stream", lambda seed, sample, length: np.full(length, (sample + 0.5) / num)
    )
    rollout = NativeEngine(policy).rollout(request_for(toy.make_prompts("image")[1:2], num))
    first, logprobs = rollout.response_ids[:, 0], rollout.old_logprobs[:, 0]
    for code in first.unique():
        chosen = first == code
        assert float(chosen.double().mean()) == pytest.approx(float(logprobs[chosen][0].exp()), abs=1 / num)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_sample_depends_on_its_own_seed_alone(
    policy: TokenLM, toy: SimpleNamespace, direction: Direction
) -> None:
    prompts, engine = toy.make_prompts(direction), NativeEngine(policy)
    before = responses(engine.rollout(request_for(prompts)))
    seeds = [(9, 0), (9, 1), (8, 2), (9, 3)]
    after = responses(engine.rollout(request_for(prompts, seeds=seeds)))
    assert {row // 2 for row in range(8) if before[row] != after[row]} == {2}


class Script:
    """A decoder whose head writes given tokens, `ids[sample]`, as long as rows keep their order."""

    copies = None

    def __init__(self, policy: TokenLM, ids: Sequence[Sequence[int]]) -> None:
        self.inner: Decoder = FusedDecoder(policy, dtype=policy.dtype)
        self.inner.sync(policy)
        self.ids, self.step_of = ids, [0] * len(ids)
        self.size = policy.allowed("text").numel()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def logits(self, hidden: torch.Tensor, direction: Direction, ids: slice) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.size)
        active = [row for row, ids in enumerate(self.ids) if self.step_of[row] < len(ids)]
        for place, row in enumerate(active[: len(hidden)]):
            logits[place, :, self.ids[row][self.step_of[row]]] = 50.0
            self.step_of[row] += 1
        return logits[..., ids]


def write(policy: TokenLM, toy: SimpleNamespace, ids: Sequence[Sequence[int]], length: int) -> Rollout:
    engine = NativeEngine(policy, decoder=Script(policy, ids))
    return engine.rollout(request_for(toy.make_prompts("text", len(ids)), 1, length))


def test_rows_end_at_their_own_end_token(
    policy: TokenLM, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_rows, "REFILL_SHARE", 0)
    eos, word = policy.vocabulary.eos, policy.vocabulary.words("white")[0]
    written = [[eos], [word, eos], [word, word, word, eos]]
    rollout = write(policy, toy, written, length=5)
    assert responses(rollout) == written
    assert rollout.response_ids[:, 4].tolist() == [policy.vocabulary.pad] * 3
    assert rollout.truncated.tolist() == [False, False, False]
    assert rollout.active_rows == (3, 2, 1, 1)
    assert rollout.attention_mask[:, rollout.prompt_length :].equal(rollout.response_mask)
    assert not rollout.old_logprobs[~rollout.response_mask].any()


def test_an_end_at_the_last_place_is_an_end_and_a_word_there_is_a_cut(
    policy: TokenLM, toy: SimpleNamespace
) -> None:
    eos, word = policy.vocabulary.eos, policy.vocabulary.words("white")[0]
    rollout = write(policy, toy, [[word, word, eos], [word] * 3, [word] * 3], length=3)
    assert responses(rollout) == [[word, word, eos], [word] * 3, [word] * 3]
    assert rollout.truncated.tolist() == [False, True, True]
    assert rollout.active_rows == (3, 3, 3)


def test_a_picture_is_never_cut_and_every_token_says_where_it_is_from(
    policy: TokenLM, toy: SimpleNamespace
) -> None:
    engine = NativeEngine(policy)
    engine.sync(policy, 7)
    rollout = engine.rollout(request_for(toy.make_prompts("image"), sampling=GUIDED))
    assert not rollout.truncated.any() and rollout.response_mask.all()
    assert rollout.active_rows == (8, 8, 8, 8) and rollout.group_size == 2
    assert rollout.input_ids.shape == (8, rollout.prompt_length + 4)
    assert rollout.tokens_per_s > 0
    origin = rollout.origin
    assert (origin.policy_version == 7).all() and (origin.modality == 1).all()
    assert (origin.guidance == 3.0).all() and (origin.temperature == torch.tensor(0.8)).all()


def test_rows_are_prompt_major(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("image")
    rollout = NativeEngine(policy).rollout(request_for(prompts))
    for row in range(8):
        real = rollout.attention_mask[row, : rollout.prompt_length]
        ids = rollout.input_ids[row, : rollout.prompt_length]
        assert ids[real].tolist() == policy.prompt_ids(prompts[row // 2])
        assert (ids[~real] == policy.vocabulary.pad).all()


def test_a_prompt_is_run_once_for_its_group(
    policy: TokenLM, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = NativeEngine(policy, max_rows=5), []
    engine.sync(policy, 0)
    engine.prove()
    prefill = engine.decoder.prefill
    monkeypatch.setattr(
        engine.decoder, "prefill", lambda ids, *rest: seen.extend(ids.tolist()) or prefill(ids, *rest)
    )
    engine.rollout(request_for(toy.make_prompts("image", 4), 6))
    assert len(seen) == 4


def test_changed_weights_are_taken_over(toy: SimpleNamespace) -> None:
    policy = toy.make_policy(seed=4)
    engine, request = NativeEngine(policy), request_for(toy.make_prompts("image"))
    before = engine.rollout(request)
    with torch.no_grad():
        policy.lm.lm_head.weight.mul_(3.0)
    after = engine.rollout(request)
    assert not after.old_logprobs.equal(before.old_logprobs)
    assert_same(after, NativeEngine(policy).rollout(request))


def test_a_rollout_takes_no_global_random_numbers(policy: TokenLM, toy: SimpleNamespace) -> None:
    request = request_for(toy.make_prompts("image"))
    torch.manual_seed(1)
    first = NativeEngine(policy).rollout(request)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = NativeEngine(policy).rollout(request)
    assert first.input_ids.equal(second.input_ids)
    torch.manual_seed(1)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("sampling", [SamplingSettings(), GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_sample_that_is_stopped_goes_on_elsewhere(
    policy: TokenLM, toy: SimpleNamespace, direction: Direction, sampling: SamplingSettings
) -> None:
    """One step here, the next on an engine with another decoder: the same tokens in the end."""
    prompts = toy.make_prompts(direction)
    request = request_for(prompts, sampling=sampling)
    samples, steps = begin(request), 0
    engines = [NativeEngine(policy, max_rows=3), NativeEngine(policy, decoder=GenericDecoder(policy))]
    while not all(sample.is_done for sample in samples):
        engine = engines[steps % 2]
        engine.sync(policy, steps)
        samples = engine.run(samples, max_steps=1)
        steps += 1
    ids = [policy.prompt_ids(prompt) for prompt in prompts]
    resumed = assemble(samples, ids, group_size=2, pad=policy.vocabulary.pad)
    assert_same(resumed, NativeEngine(policy).rollout(request))
    versions = resumed.origin.policy_version[0][resumed.response_mask[0]]
    assert versions.tolist() == sorted(versions.tolist()) and versions[0] == 0


def test_an_unfinished_sample_is_no_rollout(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("image", 1)
    samples = NativeEngine(policy).run(begin(request_for(prompts)), max_steps=2)
    assert [len(sample.ids) for sample in samples] == [2, 2]
    with pytest.raises(RolloutError, match=r"p0, sample 0: 2 of 4 tokens and no end"):
        assemble(samples, [policy.prompt_ids(prompts[0])], group_size=2, pad=0)


@pytest.mark.parametrize("wrong", [-1, 0, 10_000])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_another_model_began_is_refused(
    policy: TokenLM, toy: SimpleNamespace, direction: Direction, wrong: int
) -> None:
    """Ids that this policy does not have, or may not write there (0 pads)."""
    engine = NativeEngine(policy)
    fine, other = engine.run(begin(request_for(toy.make_prompts(direction, 1))), max_steps=2)
    assert not other.is_done
    foreign = dataclasses.replace(other, ids=(other.ids[0], wrong))
    with pytest.raises(
        ConfigError, match=rf"p0, sample 1: its token 1 is {wrong}, .* begun by another model"
    ):
        engine.run([fine, foreign])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"logprobs": ()}, "2 tokens, 0 log-probs and 2 versions"),
        ({"ids": (12, 13, 14)}, "3 tokens, 2 log-probs"),
        ({"ids": (12,) * 6, "logprobs": (0.0,) * 6, "versions": (0,) * 6}, "6 tokens of 4 at most"),
        ({"ids": (12.0, 13.0)}, "are not all ids"),
        ({"ids": (12, 2**70)}, "are not all ids"),
        ({"is_ended": True}, "a picture that ended with a token"),
    ],
)
def test_a_picture_that_was_changed_on_its_way_is_refused(
    policy: TokenLM, toy: SimpleNamespace, changed: dict[str, object], told: str
) -> None:
    engine = NativeEngine(policy)
    (half,) = engine.run(begin(request_for(toy.make_prompts("image", 1), 1)), max_steps=2)
    with pytest.raises(ConfigError, match=f"p0, sample 0: .*{told}.*begin it anew"):
        engine.run([dataclasses.replace(half, **changed)])  # type: ignore[arg-type]


@pytest.mark.parametrize(("ids", "is_ended"), [((7, 3, 8), False), ((7, 8, 3), False), ((7, 8, 9), True)])
def test_a_text_ends_with_its_first_end_token(
    policy: TokenLM, toy: SimpleNamespace, ids: tuple[int, ...], is_ended: bool
) -> None:
    assert policy.vocabulary.eos == 3
    (fresh,) = begin(request_for(toy.make_prompts("text", 1), 1, length=9))
    began = fresh.extended(ids, [0.0] * 3, version=0, is_ended=is_ended)
    with pytest.raises(ConfigError, match=rf"is_ended is {is_ended} with \d end tokens \(3\) among 3"):
        NativeEngine(policy).run([began])


def test_threads_take_turns(policy: TokenLM, toy: SimpleNamespace) -> None:
    request = request_for(toy.make_prompts("text", 4), 8, length=12)
    whole, engine = NativeEngine(policy).rollout(request), NativeEngine(policy, max_rows=2)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(engine.rollout, [request] * 3):
            assert_same(found, whole)


def test_prompts_of_two_directions_are_refused(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("image", 2)
    mixed = [prompts[0], dataclasses.replace(prompts[1], direction="text")]
    with pytest.raises(ConfigError, match=r"p1: direction 'text', the first prompt's is 'image'"):
        NativeEngine(policy).rollout(request_for(mixed))


def test_a_picture_of_another_length_is_refused(policy: TokenLM, toy: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"3 tokens are asked for, a picture has 4"):
        NativeEngine(policy).rollout(request_for(toy.make_prompts("image", 2), length=3))


def test_settings_that_cannot_be_trained_are_refused(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("image", 2)
    with pytest.raises(ConfigError, match=r"temperature is 0\.0; .* argmax"):
        NativeEngine(policy).rollout(request_for(prompts, sampling=SamplingSettings(temperature=0.0)))
    with pytest.raises(ConfigError, match="1 seeds for 2 prompts"):
        NativeEngine(policy).rollout(request_for(prompts, seeds=[(1,)]))
    with pytest.raises(ConfigError, match="max_rows is 0"):
        NativeEngine(policy, max_rows=0)


def test_half_precision_stays_close(policy: TokenLM, toy: SimpleNamespace) -> None:
    request = request_for(toy.make_prompts("image"), sampling=SamplingSettings(temperature=2.0))
    whole = NativeEngine(policy).rollout(request)
    half = NativeEngine(policy, dtype=torch.bfloat16).rollout(request)
    same = half.response_ids.equal(whole.response_ids)
    assert same or (half.response_ids == whole.response_ids).float().mean() > 0.5
    first = half.response_ids[:, 0] == whole.response_ids[:, 0]
    torch.testing.assert_close(half.old_logprobs[first, 0], whole.old_logprobs[first, 0], atol=0.05, rtol=0)


@pytest.mark.parametrize("decoder", DECODERS)
def test_more_tokens_than_the_model_has_positions_are_refused(
    policy: TokenLM, toy: SimpleNamespace, decoder: str
) -> None:
    short, long = toy.make_prompts("image", 2)
    long = dataclasses.replace(long, caption=" ".join(["dark"] * 100))
    engine = NativeEngine(policy, decoder=DECODERS[decoder](policy))
    with pytest.raises(
        ConfigError, match=r"p1: a prompt of \d+ tokens and 4 new ones, the model has \d+ pos"
    ):
        engine.rollout(request_for([short, long]))
    with pytest.raises(ConfigError, match=r"and 100000000000 new ones, the model has \d+ pos"):
        engine.rollout(request_for(toy.make_prompts("text", 1), length=10**11))  # before memory is taken


@pytest.mark.parametrize("decoder", DECODERS)
def test_prompts_of_very_unequal_length_do_not_disturb_each_other(
    policy: TokenLM, toy: SimpleNamespace, decoder: str
) -> None:
    short, long = toy.make_prompts("image", 2)
    long = dataclasses.replace(long, caption=" ".join(["dark"] * 50))
    engine = NativeEngine(policy, max_rows=3, decoder=DECODERS[decoder](policy))
    whole = engine.rollout(request_for([short, long], 2, sampling=GUIDED))
    alone = [engine.rollout(request_for([prompt], 2, sampling=GUIDED)) for prompt in (short, long)]
    assert responses(whole) == [row for part in alone for row in responses(part)]
    expected = torch.cat([part.old_logprobs for part in alone])
    torch.testing.assert_close(whole.old_logprobs, expected, atol=1e-5, rtol=0)


def test_a_sample_can_be_stopped_at_every_step(policy: TokenLM, toy: SimpleNamespace) -> None:
    request = request_for(toy.make_prompts("image", 3), 2, sampling=GUIDED)
    whole, samples = NativeEngine(policy).run(begin(request)), begin(request)
    engine = NativeEngine(policy, max_rows=4)
    while not all(sample.is_done for sample in samples):
        samples = engine.run(samples, max_steps=1)
    assert [sample.ids for sample in samples] == [sample.ids for sample in whole]


def test_weights_that_are_nan_stop_the_rollout_with_a_remedy(toy: SimpleNamespace) -> None:
    broken = toy.make_policy(seed=4)
    with torch.no_grad():
        next(broken.lm.parameters()).fill_(float("nan"))
    with pytest.raises(RolloutError, match=r"total probability is nan.*last good checkpoint"):
        NativeEngine(broken).rollout(request_for(toy.make_prompts("text", 1)))


def test_a_negative_seed_is_refused(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("text", 1)
    with pytest.raises(ConfigError, match=r"p0: seed \(3, -1\); a seed is made of integers from 0"):
        NativeEngine(policy).rollout(request_for(prompts, seeds=[(3, -1)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1.5}, "group_size is 1.5 and max_new_tokens 4; both are integers"),
        ({"length": True}, "max_new_tokens True; both are integers"),
        ({"seeds": [7]}, "p0: seed 7; a seed is made of integers"),
        ({"seeds": [(0.5,)]}, r"p0: seed \(0.5,\); a seed is made of integers"),
        ({"seeds": [()]}, r"p0: seed \(\); a seed is made of integers"),
    ],
)
def test_requests_of_another_kind_are_refused(
    policy: TokenLM, toy: SimpleNamespace, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        NativeEngine(policy).rollout(request_for(toy.make_prompts("text", 1), **options))


def test_directions_and_places_that_no_engine_has_are_refused(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompt = dataclasses.replace(toy.make_prompts("text", 1)[0], direction="picture")
    with pytest.raises(ConfigError, match="p0: direction 'picture'; wanted text or image"):
        NativeEngine(policy).rollout(request_for([prompt]))
    with pytest.raises(ConfigError, match=r"max_rows is 2\.5; the engine needs 1 or more"):
        NativeEngine(policy, max_rows=2.5)
