"""An OpenAI-compatible server of a reward's vision-language model, which answers requests in batches."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unirl.errors import ConfigError
from unirl.rewards.backends.base import Generation, VlmBackend, VlmRequest
from unirl.rewards.backends.replicas import REQUEST_ID
from unirl.rewards.backends.wire import TOKEN_ID, WireError, request_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from transformers import PreTrainedTokenizerBase

__all__ = ["ServedBackend", "make_app"]

_WAIT_S = 0.005
"""How long a batch waits for more requests."""
_KEPT_ANSWERS = 4096
"""Answers remembered by request id, so that a second try of a request costs nothing."""


class ServedBackend(VlmBackend, Protocol):
    """A backend that can be served: it also names tokens by id."""

    tokenizer: PreTrainedTokenizerBase

    def token_logprobs(
        self, requests: Sequence[VlmRequest], *, token_ids: Sequence[int] = (), top: int = 0
    ) -> list[dict[int, float] | str]:
        """Log-probabilities of next tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
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


def make_app(backend: ServedBackend, *, name: str, token: str, max_batch: int = 64) -> Starlette:
    """Return the application.

    `/v1/models`, `/v1/chat/completions` (with `logprobs`, `top_logprobs`, `logprob_token_ids`,
    `return_tokens_as_token_ids`, `continue_final_message`), `/tokenize`, `/detokenize`, `/health`. Everything
    but the last wants the token.

    Raises:
        ConfigError: If there is no token, or Starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError("a reward server needs the extra serve: pip install 'unirl[serve]'") from error
    if not token:
        raise ConfigError("reward server: the token is empty, so that anyone on the machine could ask it")
    batcher = _Batcher(backend, max_batch)
    answered: OrderedDict[str, asyncio.Future[dict[str, Any]]] = OrderedDict()

    def refusal(request: Request) -> JSONResponse | None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), token.encode()):
            return None
        return _error(401, "the token is missing or wrong")

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> JSONResponse:
        card = {"id": name, "object": "model", "owned_by": "unirl", "identity": backend.identity}
        return refusal(request) or JSONResponse({"object": "list", "data": [card]})

    async def tokenize(request: Request) -> JSONResponse:
        if (refused := refusal(request)) is not None:
            return refused
        text = str((await _body(request)).get("prompt", ""))
        ids = backend.tokenizer(text, add_special_tokens=False)["input_ids"]
        return JSONResponse({"tokens": ids, "count": len(ids)})

    async def detokenize(request: Request) -> JSONResponse:
        if (refused := refusal(request)) is not None:
            return refused
        return JSONResponse({"prompt": backend.tokenizer.decode((await _body(request)).get("tokens", []))})

    async def chat(request: Request) -> JSONResponse:
        if (refused := refusal(request)) is not None:
            return refused
        request_id = request.headers.get(REQUEST_ID, "")
        body = await _body(request)
        try:
            asked = request_of(body.get("messages"), key=request_id)
            settings = _settings(body)
        except (WireError, TypeError, KeyError, AttributeError, ValueError) as error:
            return _error(400, str(error))
        if not request_id or request_id not in answered:
            future = batcher.submit(asked, settings)
            if request_id:
                answered[request_id] = future
                while len(answered) > _KEPT_ANSWERS:
                    answered.popitem(last=False)
        else:
            future = answered[request_id]
        answer = await asyncio.shield(future)
        if "problem" in answer:
            return _error(400, answer["problem"])
        by_id = bool(body.get("return_tokens_as_token_ids"))
        document = _document(answer, backend.tokenizer, name, request_id, by_id)
        return JSONResponse(document, headers={REQUEST_ID: request_id} if request_id else {})

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        work = asyncio.create_task(batcher.run())
        yield
        work.cancel()

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
        ],
        lifespan=running,
    )


class _Batcher:
    """Collects requests that share their settings and answers them together, one batch at a time."""

    def __init__(self, backend: ServedBackend, max_batch: int) -> None:
        self._backend, self._max_batch = backend, max_batch
        self._waiting: asyncio.Queue[tuple[VlmRequest, _Settings, asyncio.Future[dict[str, Any]]]]
        self._waiting = asyncio.Queue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")

    def submit(self, request: VlmRequest, settings: _Settings) -> asyncio.Future[dict[str, Any]]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
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
                answers = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._answer, [request for request, _ in part], settings
                )
                for (_, future), answer in zip(part, answers):
                    if not future.done():
                        future.set_result(answer)

    def _answer(self, requests: Sequence[VlmRequest], settings: _Settings) -> list[dict[str, Any]]:
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


def _settings(body: Mapping[str, Any]) -> _Settings:
    stop = body.get("stop") or ()
    return _Settings(
        max_tokens=int(body.get("max_completion_tokens") or body.get("max_tokens") or 256),
        temperature=float(body.get("temperature", 1.0)),
        seed=int(body.get("seed") or 0),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        token_ids=tuple(int(token) for token in body.get("logprob_token_ids") or ()),
        top=int(body.get("top_logprobs") or 0) if body.get("logprobs") else 0,
    )


def _document(
    answer: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, name: str, request_id: str, by_id: bool
) -> dict[str, Any]:
    """The answer as a chat completion."""
    if "named" in answer:
        entries = [
            {"token": f"{TOKEN_ID}{token}" if by_id else str(tokenizer.decode([token])), "logprob": logprob}
            for token, logprob in sorted(answer["named"].items(), key=lambda item: -item[1])
        ]
        content = [{**entries[0], "top_logprobs": entries}]
        text, reason = str(entries[0]["token"]), "length"
    else:
        said: Generation = answer["said"]
        content = [{"token": "", "logprob": logprob, "top_logprobs": []} for logprob in said.token_logprobs]
        text, reason = said.text, "length" if said.truncated else "stop"
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": content},
        "finish_reason": reason,
    }
    return {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [choice],
        "usage": {"completion_tokens": len(content)},
    }


async def _body(request: Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except json.JSONDecodeError:
        return {}
    return body if isinstance(body, Mapping) else {}


def _error(status: int, message: str) -> JSONResponse:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
