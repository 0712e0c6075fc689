"""An HTTP endpoint on loopback that misbehaves on purpose, for tests and the benchmark of rewards."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

REQUEST_ID = "X-Request-Id"


@dataclass(slots=True)
class Faults:
    """What goes wrong, and how often; each share of the tries."""

    errors: float = 0.0
    """HTTP 500."""
    timeouts: float = 0.0
    """No answer for `hang_s`, or until the client hangs up."""
    doubled: float = 0.0
    """The answer's choices are doubled and out of order."""
    swapped: float = 0.0
    """The answer to another request."""
    hang_s: float = 5.0
    values: Mapping[str, Any] = field(default_factory=dict)
    """By the text of a request, what stands where its log-probability should."""
    always: Mapping[str, int] = field(default_factory=dict)
    """By the text of a request, the status that every try of it gets."""


@dataclass(slots=True)
class Seen:
    """What the server saw."""

    tries: Counter[str] = field(default_factory=Counter)
    """By request id."""
    most_at_once: int = 0
    """Requests whose client was waiting for an answer."""
    at_once: int = 0


def logprob_of(text: str) -> float:
    """The number that the server gives a request: its text ends in digits."""
    return -float(text.split()[-1]) / 1000 - 0.001


def make_app(faults: Faults, seen: Seen, *, seed: int = 0) -> Starlette:
    """Chat completions with two tokens named, `yes` with `logprob_of` the text."""
    chance = random.Random(seed)

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "stub"}]})

    async def chat(request: Request) -> Response:
        request_id = request.headers[REQUEST_ID]
        seen.tries[request_id] += 1
        seen.at_once += 1
        seen.most_at_once = max(seen.most_at_once, seen.at_once)
        try:
            await asyncio.sleep(chance.random() * 0.01)  # answers come in another order than questions
            text = (await request.json())["messages"][0]["content"][-1]["text"]
            if text in faults.always:
                return JSONResponse({}, status_code=faults.always[text])
            if chance.random() < faults.errors:
                return JSONResponse({"error": "injected"}, status_code=500)
            if chance.random() < faults.timeouts:
                with suppress(TimeoutError):  # the next message is that the client has hung up
                    await asyncio.wait_for(request.receive(), faults.hang_s)
            if chance.random() < faults.swapped:
                request_id = "another"
            value = faults.values.get(text, logprob_of(text))
            choices = [_choice(0, value)]
            if chance.random() < faults.doubled:
                choices = [_choice(1, -99.0), _choice(0, value), _choice(0, value)]
            return _json({"choices": choices}, {REQUEST_ID: request_id})
        finally:
            seen.at_once -= 1

    return Starlette(
        routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    )


def _choice(index: int, value: Any) -> dict[str, Any]:
    yes = {"token": "yes"} if value is None else {"token": "yes", "logprob": value}
    top = [yes, {"token": "no", "logprob": -3.0}]
    content = [{**yes, "top_logprobs": top}]
    return {"index": index, "message": {"content": "yes"}, "logprobs": {"content": content}}


def _json(document: Any, headers: Mapping[str, str]) -> Response:
    # NaN as Python writes it, which some servers do and which is no JSON.
    return Response(json.dumps(document), media_type="application/json", headers=dict(headers))


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serve on a free port of loopback; yields the base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
