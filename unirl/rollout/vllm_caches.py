"""What an engine remembers of old weights, and how it is made to forget."""

from __future__ import annotations

from typing import Any

from unirl.errors import RolloutError

__all__ = ["reset_caches"]

RESETS = {"reset_prefix_cache": True, "reset_mm_cache": None, "reset_encoder_cache": None}
"""Method of vLLM's engine -> what it returns when it has done its work."""


def reset_caches(llm: Any) -> None:
    """Drop keys and values of prompts, processed images, and image embeddings.

    Args:
        llm: vLLM's `LLM`, or its engine.

    Raises:
        RolloutError: If a reset is missing, or does not return what a done reset returns. The engine would
            answer with what it computed from old weights.
    """
    for method, done in RESETS.items():
        owner = next(
            (part for part in (llm, getattr(llm, "llm_engine", None)) if hasattr(part, method)), None
        )
        if owner is None:
            raise RolloutError(
                f"{type(llm).__name__} has no {method}, so it cannot forget what old weights made"
            )
        found = getattr(owner, method)()
        if found is not done:
            raise RolloutError(
                f"{type(owner).__name__}.{method} returned {found!r}, not {done!r}: it was not reset, and "
                "would answer with what old weights made; finish all requests first"
            )
