"""A process that serves rollouts over HTTP: `unirl rollout serve DIR`.

Token ids in, token ids out. Every request carries a token. The engine does one thing at a time, on one
thread.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.errors import ConfigError
from unirl.rollout.vllm_local import LocalVllm, VllmSettings
from unirl.rollout.vllm_requests import TokenRequest, WeightBucket
from unirl.rollout.weight_sync_memory import unpack

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["make_app", "serve"]

Work = Callable[[Any], Any]


def make_app(engine: LocalVllm, *, token: str) -> Starlette:
    """Make the application.

    Args:
        engine: Does the work.
        token: What a request must carry as `Authorization: Bearer TOKEN`.
    """
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    def route(path: str, work: Work, *, method: str = "POST", is_json: bool = True) -> Route:
        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return JSONResponse({"error": "a valid token is needed"}, status_code=401)
            content = None
            if method == "POST":
                content = await (request.json() if is_json else request.body())
            try:
                found = await asyncio.get_running_loop().run_in_executor(worker, work, content)
            except (ValueError, LookupError, TypeError, RuntimeError) as error:
                return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=400)
            return JSONResponse(found)

        endpoint: Callable[[Request], Awaitable[Response]] = answer
        return Route(path, endpoint, methods=[method])

    return Starlette(
        routes=[
            route("/info", lambda _: asdict(engine.info), method="GET"),
            route("/generate", lambda values: _generate(engine, values)),
            route("/weights/begin", lambda values: engine.begin_update(step=values["step"])),
            route("/weights/shared", lambda values: _put_shared(engine, values)),
            route("/weights/body", lambda body: _put_body(engine, body), is_json=False),
            route("/weights/backend", lambda values: engine.backend(**values)),
            route("/weights/learn", lambda values: engine.learn(**values)),
            route("/weights/checksums", lambda values: dict(engine.checksums(**values))),
            route("/weights/finish", lambda values: engine.finish_update(values["version"])),
        ]
    )


def serve(
    model: Path,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 8300,
    settings: VllmSettings | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until the process is told to stop.

    Args:
        model: Folder with the policy's `config.json`. The weights come from the trainer.
        token: What requests must carry.
        host: Address to listen on. Anything but loopback is reachable by others; see docs/vllm.md.
        port: 0 takes a free one.
        settings: Of the engine.
        on_ready: Called with the URL when requests are taken.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError("serving needs the extra serve: pip install 'unirl[serve]'") from error
    app = make_app(LocalVllm(model, settings), token=token)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"http://{shown}:{listener.getsockname()[1]}")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        server.run(sockets=[listener])


def _generate(engine: LocalVllm, values: dict[str, Any]) -> dict[str, Any]:
    return engine.generate(TokenRequest.from_json(values), step=engine.info.policy_version).to_json()


def _put_shared(engine: LocalVllm, values: dict[str, Any]) -> dict[str, str]:
    sums = engine.put_shared(Path(values["path"]), values["num_bytes"], values["entries"])
    return {name: pair.held for name, pair in sums.items()}


def _put_body(engine: LocalVllm, body: bytes) -> dict[str, str]:
    sums = engine.put(WeightBucket(weights=unpack(body)), step=engine.info.policy_version)
    return {name: pair.held for name, pair in sums.items()}
