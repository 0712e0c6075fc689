from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.algorithms import KL_ESTIMATORS, AdaptiveKL, kl_k1, kl_k2, kl_k3, kl_loss, mean_metrics
from unirl.errors import ConfigError, ShapeError

LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5]])
REF = torch.tensor([[-1.2, -1.5, -0.6]])


def test_worked_by_hand() -> None:
    """d = 0.2, -0.5, 0.1; k3 = exp(-d) - 1 + d."""
    torch.testing.assert_close(kl_k1(LOGPROBS, REF), torch.tensor([[0.2, -0.5, 0.1]]))
    torch.testing.assert_close(kl_k2(LOGPROBS, REF), torch.tensor([[0.02, 0.125, 0.005]]))
    k3 = torch.tensor([[0.018731, 0.148721, 0.004837]])
    torch.testing.assert_close(kl_k3(LOGPROBS, REF), k3, atol=1e-6, rtol=0)


@given(st.lists(st.floats(-60, 0), min_size=2, max_size=2))
def test_k2_and_k3_are_never_negative(pair: list[float]) -> None:
    left, right = torch.tensor(pair).unsqueeze(1)
    assert kl_k2(left, right) >= 0
    assert 0 <= kl_k3(left, right) <= 10


def test_the_expected_gradient() -> None:
    """Over all tokens of a known policy: k1 has none; k2 and the straight-through form have the KL's."""
    logits = torch.tensor([0.3, -0.4, 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.5, 0.2], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    probs = logprobs.exp()
    (wanted,) = torch.autograd.grad((probs * (logprobs - ref)).sum(), logits, retain_graph=True)

    def gradient(estimator: str, gradient_from_k2: bool) -> torch.Tensor:
        mask = torch.ones(1, 1, dtype=torch.bool)
        losses = [
            kl_loss(
                logprobs[v].reshape(1, 1),
                ref[v].reshape(1, 1),
                mask,
                estimator=estimator,
                denominator=1.0,
                gradient_from_k2=gradient_from_k2,
            )[0]
            for v in range(3)
        ]
        expected_loss = (probs.detach() * torch.stack(losses)).sum()
        return torch.autograd.grad(expected_loss, logits, retain_graph=True)[0]

    torch.testing.assert_close(gradient("k1", False), torch.zeros_like(wanted), atol=1e-10, rtol=0)
    torch.testing.assert_close(gradient("k2", False), wanted, atol=1e-10, rtol=0)
    for estimator in KL_ESTIMATORS:
        torch.testing.assert_close(gradient(estimator, True), wanted, atol=1e-10, rtol=0)
    assert not torch.allclose(gradient("k3", False), wanted, atol=1e-3)


def test_kl_loss_metrics() -> None:
    mask = torch.tensor([[True, True, False]])
    loss, metrics = kl_loss(LOGPROBS, REF, mask, estimator="k2", denominator=4.0)
    assert loss.item() == pytest.approx(0.145 / 4)
    assert mean_metrics(metrics) == pytest.approx(
        {"kl/tokens": 2.0, "kl/reference": -0.15, "kl/reference_k3": (0.018731 + 0.148721) / 2}, abs=1e-6
    )


def test_equal_policies_have_no_distance() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    for estimator in KL_ESTIMATORS:
        assert kl_loss(REF, REF, mask, estimator=estimator, denominator=1.0)[0] == 0


def test_refusals() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"'k4'; choose one of k1, k2, k3"):
        kl_loss(LOGPROBS, REF, mask, estimator="k4", denominator=1.0)
    with pytest.raises(ShapeError, match=r"\(1, 3\).*\(1, 2\)"):
        kl_k1(LOGPROBS, REF[:, :2])


def test_adaptive_kl_worked_by_hand() -> None:
    """8 is a third above 6, clipped to 0.2: 0.2 * (1 + 0.2 * 256 / 10000)."""
    controller = AdaptiveKL(value=0.2, target=6.0, horizon=10000)
    assert controller.update(8.0, 256).value == pytest.approx(0.201024)
    assert controller.update(6.0, 256) == controller
    assert AdaptiveKL(**asdict(controller)) == controller


@given(kl=st.floats(-1e6, 1e6), num=st.floats(0, 1e9))
def test_the_coefficient_never_turns_negative(kl: float, num: float) -> None:
    assert 0.79 < AdaptiveKL(value=1.0, target=0.1, horizon=100).update(kl, num).value < 1.21


def test_adaptive_kl_refusals() -> None:
    for state in ({"value": -1.0}, {"target": 0.0}, {"horizon": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(state)).replace("value", "coefficient")):
            AdaptiveKL(**({"value": 0.1, "target": 1.0, "horizon": 10.0} | state))
    with pytest.raises(ConfigError, match="measured kl is nan"):
        AdaptiveKL(value=0.1, target=1.0, horizon=10.0).update(torch.nan, 1)
