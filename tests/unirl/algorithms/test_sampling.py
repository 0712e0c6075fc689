from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.algorithms import log_distribution, sample_tokens, sampling_errors, token_logprobs
from unirl.errors import ConfigError, RolloutError, ShapeError

# Probabilities 1/2, 1/4, 1/4 at temperature 1; 2/3, 1/6, 1/6 at 1/2; ids 1 and 2 alone give 1/2, 1/2.
LOGITS = torch.tensor([math.log(2.0), 0.0, 0.0])
ONLY_1_2 = torch.tensor([False, True, True])


def random_logits(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    allowed = torch.rand(*shape, generator=generator) < 0.5
    allowed[..., seed % shape[-1]] = True
    return logits, allowed


def test_log_distribution_worked_by_hand() -> None:
    torch.testing.assert_close(log_distribution(LOGITS).exp(), torch.tensor([0.5, 0.25, 0.25]))
    torch.testing.assert_close(
        log_distribution(LOGITS, temperature=0.5).exp(), torch.tensor([2 / 3, 1 / 6, 1 / 6])
    )
    torch.testing.assert_close(log_distribution(LOGITS, ONLY_1_2).exp(), torch.tensor([0.0, 0.5, 0.5]))


def test_token_logprobs_worked_by_hand() -> None:
    logits = LOGITS.expand(1, 2, 3)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 2]]))
    torch.testing.assert_close(logprobs, torch.tensor([[math.log(1 / 2), math.log(1 / 4)]]))
    torch.testing.assert_close(entropy, torch.full((1, 2), 1.5 * math.log(2.0)))
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 2]]), allowed=ONLY_1_2)
    torch.testing.assert_close(logprobs, torch.tensor([[-math.inf, math.log(1 / 2)]]))
    torch.testing.assert_close(entropy, torch.full((1, 2), math.log(2.0)))


def test_a_single_allowed_id_is_certain() -> None:
    logits = LOGITS.expand(1, 1, 3).clone().requires_grad_()
    logprobs, entropy = token_logprobs(
        logits, torch.tensor([[1]]), allowed=torch.tensor([False, True, False])
    )
    assert logprobs.item() == 0 and entropy.item() == 0
    (logprobs + entropy).sum().backward()
    assert logits.grad is not None and not logits.grad.any()


def test_infinite_and_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[[3e4, -math.inf, 0.0, -3e4]]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0]]))
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == 0 and entropy.item() == 0
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_half_precision_is_scored_in_float32() -> None:
    logits, _ = random_logits(0, 2, 3, 50)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    half = logits.bfloat16()
    logprobs, entropy = token_logprobs(half, ids)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, token_logprobs(half.float(), ids)[0])


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), temperature=st.floats(0.3, 3.0))
def test_equals_the_slow_reference(seed: int, temperature: float) -> None:
    logits, allowed = random_logits(seed, 2, 3, 6)
    ids = torch.randint(6, (2, 3), generator=torch.Generator().manual_seed(seed))
    logprobs, entropy = token_logprobs(logits, ids, allowed=allowed, temperature=temperature)
    for b in range(2):
        for t in range(3):
            known = [v for v in range(6) if allowed[b, t, v]]
            weights = {v: math.exp(float(logits[b, t, v]) / temperature) for v in known}
            probs = {v: w / sum(weights.values()) for v, w in weights.items()}
            prob = probs.get(int(ids[b, t]), 0.0)
            assert float(logprobs[b, t]) == pytest.approx(math.log(prob) if prob else -math.inf, abs=1e-9)
            slow_entropy = -sum(p * math.log(p) for p in probs.values() if p)
            assert float(entropy[b, t]) == pytest.approx(slow_entropy, abs=1e-9)


def test_gradients_in_float64() -> None:
    """d logprob / d z = onehot - p and d entropy / d z = -p (log p + H), worked out on paper."""
    logits, allowed = random_logits(3, 2, 3, 7)
    ids = allowed.double().argmax(-1)
    logits.requires_grad_()
    logprobs, entropy = token_logprobs(logits, ids, allowed=allowed, temperature=0.7)
    log_p = log_distribution(logits.detach(), allowed, 0.7)
    p = log_p.exp()
    (of_logprobs,) = torch.autograd.grad(logprobs.sum(), logits, retain_graph=True)
    one_hot = torch.nn.functional.one_hot(ids, 7).double()
    torch.testing.assert_close(of_logprobs, (one_hot - p) / 0.7, atol=1e-10, rtol=0)
    (of_entropy,) = torch.autograd.grad(entropy.sum(), logits)
    surprise = torch.where(allowed, log_p, 0.0) + entropy.detach().unsqueeze(-1)
    torch.testing.assert_close(of_entropy, -p * surprise / 0.7, atol=1e-10, rtol=0)


def test_draws_by_inverse_cdf() -> None:
    """Cumulative 0.5, 0.75, 1: each id owns [start, end), the start included."""
    logits = LOGITS.expand(7, 3)
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 0.999, 1.0], dtype=torch.float64)
    ids, logprobs = sample_tokens(logits, uniforms=uniforms)
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 2]
    expected = torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]).log()
    torch.testing.assert_close(logprobs, expected)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53, 1.0])
def test_an_id_that_is_not_allowed_is_never_drawn(uniform: float) -> None:
    """Disallowed ids first, in the middle and last, over sums that round to more or less than 1."""
    allowed = torch.zeros(64, 1001, dtype=torch.bool)
    allowed[:, 1:-1:3] = True
    logits = 20 * torch.randn(64, 1001, generator=torch.Generator().manual_seed(0))
    ids, logprobs = sample_tokens(
        logits, uniforms=torch.full((64,), uniform, dtype=torch.float64), allowed=allowed
    )
    assert allowed.gather(1, ids.unsqueeze(1)).all()
    assert logprobs.isfinite().all()


def test_draws_have_the_distribution_that_is_scored() -> None:
    """An even grid of uniforms is a perfect sample: counts equal probabilities to one part."""
    grid = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    logits, allowed = random_logits(5, 1, 9)
    ids, logprobs = sample_tokens(logits.expand(2000, 9), uniforms=grid, allowed=allowed, temperature=1.5)
    shares = torch.bincount(ids, minlength=9) / 2000
    expected = log_distribution(logits, allowed, 1.5).exp()[0]
    torch.testing.assert_close(shares.double(), expected, atol=1 / 2000, rtol=0)
    scored, _ = token_logprobs(logits.expand(1, 2000, 9), ids.unsqueeze(0), allowed=allowed, temperature=1.5)
    assert scored[0].equal(logprobs)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_a_draw_does_not_depend_on_other_rows(seed: int) -> None:
    logits, allowed = random_logits(seed, 5, 8)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(5, generator=generator, dtype=torch.float64)
    order = torch.randperm(5, generator=generator)
    ids, logprobs = sample_tokens(logits, uniforms=uniforms, allowed=allowed)
    moved = sample_tokens(logits[order], uniforms=uniforms[order], allowed=allowed[order])
    assert moved[0].equal(ids[order]) and moved[1].equal(logprobs[order])
    alone = sample_tokens(logits[:1], uniforms=uniforms[:1], allowed=allowed[:1])
    assert alone[0].equal(ids[:1]) and alone[1].equal(logprobs[:1])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"finite number above 0.*argmax"):
        log_distribution(LOGITS, temperature=temperature)


@pytest.mark.parametrize("value", [1e-300, 1e300, "1", None, True])
def test_settings_that_leave_float32_or_are_no_numbers_are_refused(value: object) -> None:
    for name in ("temperature", "guidance"):
        if (name, value) != ("guidance", 1e-300):  # as good as no guidance
            (wrong,) = sampling_errors({name: value})  # type: ignore[dict-item]
            assert wrong.startswith(f"{name} is {value!r}; it needs a finite number"), name


def test_the_ends_of_the_settings_stay_finite() -> None:
    cond, uncond = 300 * torch.randn(2, 1, 2, 5, generator=torch.Generator().manual_seed(0))
    for temperature, guidance in ((1e-6, 1e6), (1e6, 1e6), (1e-6, 0.0), (1e6, 0.0)):
        logprobs = log_distribution(cond, temperature=temperature, uncond=uncond, guidance=guidance)
        torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(1, 2))


def test_refusals() -> None:
    logits = LOGITS.expand(1, 2, 3)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"\(1, 3\).*\(1, 2, 3\)"):
        token_logprobs(logits, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="int32"):
        token_logprobs(logits, ids.int())
    with pytest.raises(ShapeError, match=r"allowed has shape \(4,\)"):
        token_logprobs(logits, ids, allowed=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"torch\.bool"):
        token_logprobs(logits, ids, allowed=torch.ones(3))
    with pytest.raises(RolloutError, match=r"allowed\[1\] allows no id"):
        token_logprobs(logits, ids, allowed=torch.tensor([[True] * 3, [False] * 3]))
    with pytest.raises(ShapeError, match=r"uniforms has shape \(3,\)"):
        sample_tokens(logits[0], uniforms=torch.zeros(3))
    with pytest.raises(RolloutError, match=r"row 1: .*uniform is -0\.5"):
        sample_tokens(logits[0], uniforms=torch.tensor([0.5, -0.5]))
    broken = logits[0].clone()
    broken[0, 0] = math.nan
    with pytest.raises(RolloutError, match="row 0: total probability is nan"):
        sample_tokens(broken, uniforms=torch.zeros(2))


@given(seed=st.integers(0, 10_000), guidance=st.floats(0.0, 8.0))
def test_guidance_equals_the_slow_reference(seed: int, guidance: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    cond, uncond = torch.randn(2, 1, 2, 5, dtype=torch.float64, generator=generator)
    allowed = torch.tensor([True, True, False, True, True])
    ids = torch.tensor([[0, 4]])
    logprobs, entropy = token_logprobs(
        cond, ids, allowed=allowed, temperature=0.7, uncond=uncond, guidance=guidance
    )
    for t in range(2):
        weights = {
            v: math.exp((float(uncond[0, t, v]) + guidance * float(cond[0, t, v] - uncond[0, t, v])) / 0.7)
            for v in (0, 1, 3, 4)
        }
        probs = {v: weight / sum(weights.values()) for v, weight in weights.items()}
        assert logprobs[0, t].item() == pytest.approx(math.log(probs[int(ids[0, t])]))
        assert entropy[0, t].item() == pytest.approx(-sum(p * math.log(p) for p in probs.values() if p))


def test_guidance_needs_its_second_branch() -> None:
    with pytest.raises(ConfigError, match=r"guidance is 2\.0 but there are no unconditional logits"):
        log_distribution(LOGITS, guidance=2.0)
    with pytest.raises(ShapeError, match=r"uncond has shape"):
        log_distribution(LOGITS, guidance=2.0, uncond=LOGITS[..., :-1])


def test_what_cannot_be_trained_with_is_named_with_its_reason() -> None:
    assert (
        sampling_errors({"temperature": 0.7, "guidance": 3.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}) == []
    )
    wrong = sampling_errors({"temperature": 0.0, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "seed": 1})
    assert [reason.split()[0] for reason in wrong] == ["temperature", "top_p", "top_k", "min_p"]
    assert all("moves with the weights" in reason for reason in wrong[1:])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_without_a_gradient_of_the_entropy_all_else_is_the_same(temperature: float, guidance: float) -> None:
    """Log-probs to the bit. The last id of row 0 is not allowed: its log-prob is -inf and moves nothing."""
    generator = torch.Generator().manual_seed(0)
    logits, uncond = torch.randn(2, 3, 5, 11, generator=generator)
    allowed = torch.rand(5, 11, generator=generator) < 0.7
    ids = allowed.float().multinomial(3, generator=generator).T.contiguous()
    allowed[4, ids[0, 4]] = False
    weights = torch.randn(3, 5, generator=generator)
    found = []
    for entropy_gradient in (True, False):
        parts = [logits.clone().requires_grad_(), uncond.clone().requires_grad_()]
        logprobs, entropy = token_logprobs(
            parts[0],
            ids,
            allowed=allowed,
            temperature=temperature,
            uncond=parts[1],
            guidance=guidance,
            entropy_gradient=entropy_gradient,
        )
        assert entropy.requires_grad == entropy_gradient
        assert logprobs[0, 4].isneginf()
        wanted = logprobs.masked_fill(logprobs.isneginf(), 0.0) * weights
        (wanted.sum() + 0.0 * entropy.sum()).backward()
        gradients = [part.grad if part.grad is not None else torch.zeros(1) for part in parts]
        found.append([logprobs.detach(), entropy.detach(), *gradients])
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_the_written_gradient_is_the_numerical_one() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(7, (2, 3), generator=generator)

    def score(logits: torch.Tensor) -> torch.Tensor:
        return token_logprobs(logits, ids, temperature=0.5, entropy_gradient=False)[0]

    assert torch.autograd.gradcheck(score, (logits,))
