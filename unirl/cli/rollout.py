"""`unirl rollout serve`: an engine in a process of its own, for a trainer here or on another machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from unirl.errors import ConfigError
from unirl.model_folder import IMAGE_TOKENIZER, QWEN_VL, model_type

__all__ = ["COMMANDS", "serve"]


def serve(
    model: Annotated[
        Path, typer.Argument(help="Folder with the policy's config.json, such as RUN/models/sft.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; others reach anything but loopback.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8300,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="What the engine computes in.")
    ] = "float32",
    cache_bytes: Annotated[int, typer.Option(min=1, help="Memory for keys and values, on a CPU.")] = 256
    << 20,
    weight_transfer: Annotated[
        str | None, typer.Option(help="nccl takes vLLM's own transfer between GPUs; ours if left out.")
    ] = None,
    max_samples: Annotated[int, typer.Option(min=1, help="Samples that run at the same time.")] = 256,
) -> None:
    """Serve rollouts with vLLM. The trainer sends the weights and proves that they arrived.

    The token comes from UNIRL_ROLLOUT_TOKEN, or is made and shown.

    Example: unirl rollout serve runs/demo/models/sft --port 8300
    """
    if (kind := model_type(model)) in (IMAGE_TOKENIZER, QWEN_VL):
        raise ConfigError(
            f"{model}: holds a model of type {kind!r}, which is no policy; name that of the policy, such as "
            "RUN/models/sft"
        )
    from unirl.rollout.server import serve as run_server
    from unirl.rollout.server_client import TOKEN_VARIABLE
    from unirl.rollout.vllm_local import VllmSettings

    given = os.environ.get(TOKEN_VARIABLE, "")
    token = given or secrets.token_urlsafe(24)

    def on_ready(url: str) -> None:
        if not given:
            typer.echo(f"token: {token}")
        typer.echo(f"serving rollouts at {url}")

    settings = VllmSettings(dtype=dtype, cache_bytes=cache_bytes, max_samples=max_samples)
    if weight_transfer is not None:
        settings = replace(settings, weight_transfer=weight_transfer)
    run_server(model, token=token, host=host, port=port, settings=settings, on_ready=on_ready)


COMMANDS: Mapping[str, Callable[..., None]] = {"serve": serve}
