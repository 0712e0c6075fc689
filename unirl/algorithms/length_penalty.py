"""A soft charge for responses that come near the length limit (DAPO)."""

from __future__ import annotations

from torch import Tensor

from unirl.errors import ConfigError, ShapeError

__all__ = ["overlong_penalty"]


def overlong_penalty(
    lengths_B: Tensor, *, max_length: int, buffer_length: int, factor: float = 1.0
) -> Tensor:
    """Return what is added to a response's score for its length: 0, then falling to -factor at the limit.

        p = -factor * clamp((length - (max_length - buffer_length)) / buffer_length, 0, 1)

    Args:
        lengths_B: Number of response tokens (B,), any integer or float dtype.
        max_length: Length limit in tokens.
        buffer_length: Number of tokens before the limit over which the charge grows, in [1, max_length].
        factor: Charge at the limit, reward units, 0 or more.

    Returns:
        Float32 (B,), 0 or below.

    Raises:
        ConfigError: If buffer_length or factor is out of range.
        ShapeError: If lengths_B is not 1-D.

    Source: Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 13; `apply_overlong_penalty` of
    OpenRLHF 0.11.2.
    """
    if not 1 <= buffer_length <= max_length:
        raise ConfigError(
            f"buffer_length is {buffer_length}; it needs a number from 1 to max_length {max_length}"
        )
    if not factor >= 0.0:
        raise ConfigError(f"overlong factor is {factor}; it is a charge and needs a number from 0")
    if lengths_B.ndim != 1:
        raise ShapeError(f"lengths_B has shape {tuple(lengths_B.shape)}; it needs 1 axis")
    exceeded = (lengths_B.float() - (max_length - buffer_length)) / buffer_length
    return -factor * exceeded.clamp(0.0, 1.0)
