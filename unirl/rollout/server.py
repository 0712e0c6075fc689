"""A process that serves rollouts over HTTP: `unirl rollout serve DIR`.

Token ids in, token ids out. Every request carries a token. The engine does one thing at a time, on one
thread.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.errors import ConfigError, RolloutError
from unirl.rollout.server_client import TOKEN_VARIABLE, UPDATE_HEADER
from unirl.rollout.vllm_local import LocalVllm, VllmSettings
from unirl.rollout.vllm_requests import TokenRequest, WeightBucket
from unirl.rollout.weight_sync_memory import unpack

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["make_app", "serve"]

Work = Callable[[Any], Any]
Guard = Callable[[str], None]


class _Updates:
    """Whose weights the engine has. Versions do not tell: two trainers may be at the same one."""

    def __init__(self) -> None:
        self.begun = self.done = ""

    def begin(self) -> dict[str, str]:
        self.begun, self.done = secrets.token_hex(8), ""
        return {"update": self.begun}

    def finish(self) -> None:
        self.done = self.begun

    def require_begun(self, name: str) -> None:
        if name != self.begun:
            raise RolloutError(
                "another trainer began to sync its weights while this one did, or the server was restarted; "
                "give each trainer a server of its own"
            )

    def require_done(self, name: str) -> None:
        if name != self.done:
            raise RolloutError(
                "the engine's weights are not those of this trainer's last sync: another trainer has "
                "synced its own, or the server was restarted; give each trainer a server of its own, and "
                "resume the run"
            )


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
    updates = _Updates()

    def route(
        path: str, work: Work, *, guard: Guard | None = None, method: str = "POST", is_json: bool = True
    ) -> Route:
        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                wrong = f"the token is missing or wrong; {TOKEN_VARIABLE} holds it, here and with the trainer"
                return JSONResponse({"error": wrong}, status_code=401)
            name = request.headers.get(UPDATE_HEADER, "")

            def answered(content: Any) -> Response:
                if guard is not None:
                    guard(name)
                return JSONResponse(work(content))

            try:
                content = await (request.json() if is_json else request.body()) if method == "POST" else None
                return await asyncio.get_running_loop().run_in_executor(worker, answered, content)
            except Exception as error:  # whatever the engine raises is the trainer's to know
                return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=400)

        endpoint: Callable[[Request], Awaitable[Response]] = answer
        return Route(path, endpoint, methods=[method])

    def begin(values: dict[str, Any]) -> dict[str, str]:
        engine.begin_update(step=values["step"])
        return updates.begin()

    def backend(values: dict[str, Any]) -> dict[str, str]:
        engine.backend(**values)
        return updates.begin() if values["method"] == "start_weight_update" else {}

    def learn(values: dict[str, Any]) -> dict[str, str]:
        engine.learn(**values)
        return updates.begin()

    def finish(values: dict[str, Any]) -> None:
        engine.finish_update(values["version"])
        updates.finish()

    begun = updates.require_begun
    return Starlette(
        routes=[
            route("/info", lambda _: {**asdict(engine.info), "update": updates.done}, method="GET"),
            route("/generate", lambda values: _generate(engine, values), guard=updates.require_done),
            route("/weights/begin", begin),
            route("/weights/shared", lambda values: _put_shared(engine, values), guard=begun),
            route("/weights/body", lambda body: _put_body(engine, body), guard=begun, is_json=False),
            route("/weights/backend", backend),
            route("/weights/learn", learn),
            route("/weights/checksums", lambda values: dict(engine.checksums(**values)), guard=begun),
            route("/weights/finish", finish, guard=begun),
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

    Raises:
        ConfigError: If there is no listening there; before the engine is started.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError("serving needs the extra serve: pip install 'unirl[serve]'") from error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {error.strerror}; give another --port, or an "
                "address of this machine as --host"
            ) from error
        app = make_app(LocalVllm(model, settings), token=token)
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
