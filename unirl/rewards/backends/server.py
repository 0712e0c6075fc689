"""An OpenAI-compatible server of a reward's vision-language model, which answers requests in batches."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from unirl.errors import ConfigError
from unirl.rewards.backends.base import Generation
from unirl.rewards.backends.batcher import Answer, Batcher, RequestSettings, ServedBackend
from unirl.rewards.backends.replicas import REQUEST_ID
from unirl.rewards.backends.wire import TOKEN_ID, WireError, request_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from transformers import PreTrainedTokenizerBase

__all__ = ["ServedBackend", "make_app"]

_KEPT_ANSWERS = 4096
"""Answers remembered by request id, so that a second try of a request costs nothing."""


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
    batcher = Batcher(backend, max_batch)
    answered: OrderedDict[str, asyncio.Future[Answer]] = OrderedDict()

    def refusal(request: Request) -> JSONResponse | None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), token.encode()):
            return None
        return _error(
            401, "the token is missing or wrong; UNIRL_REWARD_TOKEN holds it, here and with clients"
        )

    def forget_failed(request_id: str, future: asyncio.Future[Answer]) -> None:
        if future.cancelled() or future.exception() is not None:
            answered.pop(request_id, None)

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
            settings = _settings(body, num_tokens=len(backend.tokenizer))
        except (WireError, TypeError, KeyError, AttributeError, ValueError) as error:
            return _error(400, str(error))
        if not request_id or request_id not in answered:
            future = batcher.submit(asked, settings)
            future.add_done_callback(partial(forget_failed, request_id))
            if request_id:
                answered[request_id] = future
                while len(answered) > _KEPT_ANSWERS:
                    answered.popitem(last=False)
        else:
            future = answered[request_id]
        await asyncio.wait([future])  # a client that hangs up cancels its waiting, not the answer
        if (failure := future.exception()) is not None:
            return _error(500, f"{type(failure).__name__}: {failure}")
        answer = future.result()
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


def _settings(body: Mapping[str, Any], *, num_tokens: int) -> RequestSettings:
    """Read what is asked for.

    Raises:
        ValueError: If it cannot be given: no token at all, or one that the vocabulary lacks.
    """
    stop = body.get("stop") or ()
    given = body.get("max_completion_tokens", body.get("max_tokens"))
    settings = RequestSettings(
        max_tokens=256 if given is None else int(given),
        temperature=float(body.get("temperature", 1.0)),
        seed=int(body.get("seed") or 0),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        token_ids=tuple(int(token) for token in body.get("logprob_token_ids") or ()),
        top=int(body.get("top_logprobs") or 0) if body.get("logprobs") else 0,
    )
    if settings.max_tokens < 1 or settings.seed < 0:
        raise WireError(f"max_tokens is {settings.max_tokens}, seed {settings.seed}; wanted 1, 0 or more")
    if not 0 <= settings.temperature < math.inf:
        raise WireError(f"temperature is {settings.temperature}, wanted 0 or more")
    if not all(0 <= token < num_tokens for token in (*settings.token_ids, settings.top)):
        raise WireError(f"logprob_token_ids and top_logprobs must be below {num_tokens}, the vocabulary")
    return settings


def _document(
    answer: Answer, tokenizer: PreTrainedTokenizerBase, name: str, request_id: str, by_id: bool
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
