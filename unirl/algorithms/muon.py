"""The Muon optimizer in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Muon", "orthogonalized"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, for the matrices inside a network; not for embeddings, heads or vectors.

    m <- mu m + (1 - mu) g;  w <- (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) orthogonalized(m')

    with the Nesterov form m' = mu m + (1 - mu) g. The factor gives steps of AdamW's usual size, so that one
    learning rate serves both. torch.optim.Muon with adjust_lr_fn="match_rms_adamw" is the same in bfloat16,
    which processors without bfloat16 arithmetic run four times slower than float32.

    Args:
        matrices: Float32 parameters of two axes.
        learning_rate: As for AdamW.

    Source: Liu et al. 2025, Muon is Scalable for LLM Training (arXiv 2502.16982), section 2.2.
    """

    def __init__(
        self,
        matrices: Iterable[Parameter],
        *,
        learning_rate: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(matrices, {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; a parameter without gradient stays."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                average = state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                direction = orthogonalized(weight.grad.lerp(average, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(direction, alpha=-0.2 * math.sqrt(max(weight.shape)) * group["lr"])


def orthogonalized(matrix: Tensor, *, num_iterations: int = 5) -> Tensor:
    """Bring the singular values of a float32 (m, n) matrix near 1, 0.6 to 1.3, and keep its directions.

    Newton-Schulz: X <- a X + (b A + c A^2) X with A = X X^T, from X of Frobenius norm 1.

    Source: Jordan et al. 2024, Muon (kellerjordan.github.io/posts/muon), for the coefficients.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    slope, cubic, quintic = COEFFICIENTS
    for _ in range(num_iterations):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), wide, beta=slope)
    return wide.T if is_tall else wide
