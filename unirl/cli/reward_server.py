"""`unirl reward serve`: a reward model behind an OpenAI-compatible address."""

from __future__ import annotations

import os
import secrets
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from unirl.model_folder import QWEN_VL, model_type, require_model

__all__ = ["TOKEN_HELP", "serve", "token_of"]

TOKEN_VARIABLE = "UNIRL_REWARD_TOKEN"
TOKEN_HELP = f"File with the server's bearer token; else that of {TOKEN_VARIABLE}."


def token_of(file: Path | None) -> str:
    """The token that a server wants: what the file holds, else that of the environment, or none."""
    given = os.environ.get(TOKEN_VARIABLE, "") if file is None else file.read_text(encoding="utf-8")
    return given.strip()


class Engine(StrEnum):
    """What runs the model."""

    transformers = "transformers"
    vllm = "vllm"


def serve(
    directory: Annotated[Path, typer.Argument(help="Folder of a Qwen2.5-VL of transformers.")],
    host: Annotated[str, typer.Option(help="Address to listen on; loopback unless you say otherwise.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8011,
    engine: Annotated[Engine, typer.Option(help="What runs the model.")] = Engine.transformers,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests answered together.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=0, help="Longest request; 0: the model's own limit.")] = 0,
) -> None:
    """Serve a reward model until interrupted; clients need the token of UNIRL_REWARD_TOKEN.

    Example: UNIRL_REWARD_TOKEN=secret unirl reward serve models/reward --port 8011
    """
    import uvicorn

    from unirl.rewards.backends.qwen import TransformersBackend
    from unirl.rewards.backends.server import ServedBackend, make_app
    from unirl.rewards.backends.vllm import VllmBackend

    if engine is Engine.transformers:
        require_model(directory, QWEN_VL)
    else:
        model_type(directory)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        token = secrets.token_urlsafe(24)
        typer.echo(f"token: {token} (set {TOKEN_VARIABLE} to choose it)")
    limit = max_tokens or None
    backend: ServedBackend
    if engine is Engine.vllm:
        backend = VllmBackend.load(directory, max_tokens=limit)
    else:
        backend = TransformersBackend.load(directory, batch_size=max_batch, max_tokens=limit)
    app = make_app(backend, name=directory.resolve().name, token=token, max_batch=max_batch)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listening = uvicorn.Config(app, host=host, port=port).bind_socket()
    typer.echo(f"{directory}: http://{host}:{listening.getsockname()[1]}/v1")
    server.run(sockets=[listening])
    backend.close()
