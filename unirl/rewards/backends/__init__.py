"""Where a vision-language reward's model runs."""

from __future__ import annotations

from unirl.rewards.backends.base import (
    CLIP_MARK,
    IMAGE_MARK,
    AnswerLogprobs,
    Generation,
    VlmBackend,
    VlmRequest,
)

__all__ = ["CLIP_MARK", "IMAGE_MARK", "AnswerLogprobs", "Generation", "VlmBackend", "VlmRequest"]
