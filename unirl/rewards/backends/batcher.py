"""Requests of a reward server, collected into batches for the model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unirl.rewards.backends.base import VlmBackend, VlmRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Answer", "Batcher", "RequestSettings", "ServedBackend"]

logger = logging.getLogger("unirl.rewards")

_WAIT_S = 0.005
"""How long a batch waits for more requests."""
Answer = dict[str, Any]
""""named": log-probabilities by token; or "said": a `Generation`; or "problem": why there is neither."""


class ServedBackend(VlmBackend, Protocol):
    """A backend that can be served: it also names tokens by id."""

    tokenizer: PreTrainedTokenizerBase

    def token_logprobs(
        self, requests: Sequence[VlmRequest], *, token_ids: Sequence[int] = (), top: int = 0
    ) -> list[dict[int, float] | str]:
        """Log-probabilities of next tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """What requests of one batch share."""

    max_tokens: int
    temperature: float
    seed: int
    stop: tuple[str, ...]
    token_ids: tuple[int, ...]
    top: int

    @property
    def asks_for_one_token(self) -> bool:
        return self.max_tokens == 1 and bool(self.token_ids or self.top)


class Batcher:
    """Collects requests that share their settings and answers them together, one batch at a time.

    What the model raises is logged and told to those who wait for that batch; the next one is answered.
    """

    def __init__(self, backend: ServedBackend, max_batch: int) -> None:
        self._backend, self._max_batch = backend, max_batch
        self._waiting: asyncio.Queue[tuple[VlmRequest, RequestSettings, asyncio.Future[Answer]]]
        self._waiting = asyncio.Queue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")

    def submit(self, request: VlmRequest, settings: RequestSettings) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((request, settings, future))
        return future

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            batch = [await self._waiting.get()]
            await asyncio.sleep(_WAIT_S)
            while len(batch) < self._max_batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            for settings in dict.fromkeys(settings for _, settings, _ in batch):
                part = [(request, future) for request, its, future in batch if its == settings]
                work = asyncio.get_running_loop().run_in_executor(
                    self._thread, self._answer, [request for request, _ in part], settings
                )
                await asyncio.wait([work])
                _hand_out(work, [future for _, future in part])

    def _answer(self, requests: Sequence[VlmRequest], settings: RequestSettings) -> list[Answer]:
        if settings.asks_for_one_token:
            named = self._backend.token_logprobs(requests, token_ids=settings.token_ids, top=settings.top)
            return [{"problem": n} if isinstance(n, str) else {"named": n} for n in named]
        said = self._backend.generate(
            requests,
            max_new_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            stop=settings.stop,
        )
        return [{"problem": g.problem} if g.problem else {"said": g} for g in said]


def _hand_out(work: asyncio.Future[list[Answer]], futures: Sequence[asyncio.Future[Answer]]) -> None:
    error = work.exception()
    if error is not None:
        logger.error("the model failed on a batch of %d requests", len(futures), exc_info=error)
    for place, future in enumerate(futures):
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(work.result()[place])
