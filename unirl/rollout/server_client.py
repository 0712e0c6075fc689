"""A token engine behind a URL: `unirl rollout serve` on this machine or another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from unirl.errors import ConfigError, RolloutError
from unirl.rollout.vllm_requests import Checksums, EngineInfo, TokenAnswer, TokenRequest, WeightBucket
from unirl.rollout.weight_sync_memory import SharedBlock, fill, layout, pack

__all__ = ["TOKEN_VARIABLE", "RemoteVllm"]

TOKEN_VARIABLE = "UNIRL_ROLLOUT_TOKEN"
SHARED_VARIABLE = "UNIRL_ROLLOUT_SHARED_MEMORY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
UPDATE_HEADER = "X-Unirl-Update"
"""Of a request: the update that its weights belong to, or that it wants to sample from."""
_MAX_SHOWN = 2000  # characters of an answer that is an error
_NO_SERVER = "this is no `unirl rollout serve` of this version; look at the URL"


class RemoteVllm:
    """Speaks to one server.

    Args:
        url: Such as `http://127.0.0.1:8300`.
        token: The server's; None reads the environment variable UNIRL_ROLLOUT_TOKEN.
        timeout_s: How long any answer may take. An engine that accepts a request and never answers is an
            error then, with its endpoint and the step.
        shared_memory: Send weights through /dev/shm; None does so when the URL is a loopback address, unless
            the environment variable UNIRL_ROLLOUT_SHARED_MEMORY is 0.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 600.0,
        shared_memory: bool | None = None,
    ) -> None:
        secret = (token or os.environ.get(TOKEN_VARIABLE, "")).strip()
        if not secret or not (secret.isascii() and secret.isprintable()):
            what = "has characters that no request can carry" if secret else "is missing"
            raise ConfigError(
                f"{url}: the token of the rollout server {what}; set {TOKEN_VARIABLE} to the server's"
            )
        if not (isinstance(timeout_s, int | float) and 0 < timeout_s < float("inf")):
            raise ConfigError(f"{url}: timeout_s is {timeout_s!r}; wanted seconds, more than 0")
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        if not _is_server_url(url):
            raise ConfigError(
                f"{url!r} is no URL of a rollout server; wanted one such as http://127.0.0.1:8300"
            )
        self._client = httpx.Client(
            base_url=self._url,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            headers={"Authorization": f"Bearer {secret}"},
            trust_env=False,
        )
        is_near = urlsplit(url).hostname in LOOPBACK and os.environ.get(SHARED_VARIABLE) != "0"
        self._shared: SharedBlock | None = None
        self._begun = ""
        found = self._call("GET", "info", step=None)
        with self._expected("info", found):
            self.info = replace(EngineInfo(**found), endpoint=self._url)
        if is_near if shared_memory is None else shared_memory:
            self._shared = SharedBlock()

    def generate(self, request: TokenRequest, *, step: int) -> TokenAnswer:
        """Serve a request."""
        found = self._call("POST", "generate", step=step, update=self.info.update, json=request.to_json())
        with self._expected(f"generate, step {step}", found):
            answer = TokenAnswer.from_json(found)
        if answer.policy_version != self.info.policy_version:
            raise RolloutError(
                f"{self._url}/generate, step {step}: answered with policy version {answer.policy_version}, "
                f"this trainer synced {self.info.policy_version}; another trainer uses the same server"
            )
        return answer

    def begin_update(self, *, step: int) -> None:
        """Get ready for new weights."""
        found = self._call("POST", "weights/begin", step=step, json={"step": step})
        with self._expected(f"weights/begin, step {step}", found):
            self._begun = found["update"]

    def put(self, bucket: WeightBucket, *, step: int) -> Mapping[str, Checksums]:
        """Load some weights, through shared memory or in the body of a request."""
        if self._shared is None:
            body, sent = pack(bucket, self.info.checksum)
            found = self._call("POST", "weights/body", step=step, content=body)
        else:
            entries, num_bytes = layout(bucket)
            sent = fill(self._shared.reserve(num_bytes), bucket, entries, self.info.checksum)
            block = {"path": str(self._shared.path), "num_bytes": num_bytes}
            values = {**block, "entries": [asdict(entry) for entry in entries]}
            found = self._call("POST", "weights/shared", step=step, json=values)
        with self._expected(f"weights, step {step}", found):
            return {name: Checksums(sent=sent[name], held=held) for name, held in found.items()}

    def backend(self, method: str, values: Mapping[str, Any], *, step: int) -> None:
        """Call one of the methods of vLLM's weight transfers in the server's worker."""
        content = {"method": method, "values": dict(values), "step": step}
        found = self._call("POST", "weights/backend", step=step, json=content)
        with self._expected(f"weights/backend, step {step}", found):
            self._begun = found.get("update", self._begun)

    def learn(self, shapes: Mapping[str, tuple[int, ...]], *, step: int) -> None:
        """Find out where tensors of these names and shapes end up. Overwrites the weights."""
        content = {"shapes": dict(shapes), "step": step}
        found = self._call("POST", "weights/learn", step=step, json=content)
        with self._expected(f"weights/learn, step {step}", found):
            self._begun = found["update"]

    def checksums(self, *, step: int) -> Mapping[str, str]:
        """Of all tensors as the engine holds them."""
        found: dict[str, str] = self._call("POST", "weights/checksums", step=step, json={"step": step})
        return found

    def finish_update(self, version: int) -> None:
        """End the update."""
        self._call("POST", "weights/finish", step=version, json={"version": version})
        self.info = replace(self.info, policy_version=version, update=self._begun)

    def close(self) -> None:
        """Close the connection; the server goes on."""
        self._client.close()
        if self._shared is not None:
            self._shared.close()

    @contextmanager
    def _expected(self, place: str, found: object) -> Iterator[None]:
        """Read an answer; one that is made otherwise is of another server."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RolloutError(f"{self._url}/{place}: answered {found!r:.200}; {_NO_SERVER}") from error

    def _call(
        self, method: str, path: str, *, step: int | None, update: str | None = None, **content: Any
    ) -> Any:
        place = f"{self._url}/{path}" + ("" if step is None else f", step {step}")
        try:
            headers = {UPDATE_HEADER: self._begun if update is None else update}
            response = self._client.request(method, path, headers=headers, **content)
        except httpx.TimeoutException as error:
            raise RolloutError(
                f"{place}: no answer within {self._timeout_s:g} s; the engine took the request and hangs, or "
                "is overloaded. Look at its log and restart it; the run goes on from its last checkpoint"
            ) from error
        except httpx.RequestError as error:
            raise RolloutError(f"{place}: {error or type(error).__name__}; is the server running?") from error
        if response.status_code != httpx.codes.OK:
            told = response.text.strip()[:_MAX_SHOWN]
            raise RolloutError(f"{place}: status {response.status_code}, {told}")
        try:
            return response.json()
        except ValueError as error:
            raise RolloutError(f"{place}: answered {response.text!r:.200}; {_NO_SERVER}") from error


def _is_server_url(url: str) -> bool:
    try:
        parts = httpx.URL(url)
    except (TypeError, ValueError, httpx.InvalidURL):
        return False
    return parts.scheme in ("http", "https") and bool(parts.host)
