"""Many requests to a few servers: bounded, retried, each answered once, in order."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from unirl.errors import ConfigError, RewardError
from unirl.rewards.failures import is_over_budget

__all__ = ["Failed", "Replicas", "RetryPolicy"]

REQUEST_ID = "X-Request-Id"
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When to try again."""

    attempts: int = 6
    """Tries of one request, the first among them."""
    timeout_s: float = 60.0
    """Of one try."""
    first_wait_s: float = 0.2
    """The wait after try n is drawn from 0 to first_wait_s * 2**n: clients do not come back all at once."""
    max_wait_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request that got no answer."""

    reason: str


class _TryAgain(Exception):
    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Jitter(Protocol):
    """Where waits come from: a uniform number in [0, 1)."""

    def random(self) -> float:
        """Draw."""
        ...


class Replicas:
    """A few servers of one model, asked from a thread of their own.

    Args:
        urls: Base URLs, each with the path up to `/v1`.
        token: Sent as a bearer token; "" sends none.
        concurrency: Requests under way at once, over all servers.
        retries: When to try again.
        max_failed_fraction: Share of one call's requests that may fail; one more stops the call at once.
        jitter: Uniform numbers for the waits; a generator of numpy will do.

    Raises:
        ConfigError: If there is no URL.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str = "",
        concurrency: int = 32,
        retries: RetryPolicy | None = None,
        max_failed_fraction: float = 0.1,
        jitter: Jitter,
    ) -> None:
        if not urls:
            raise ConfigError("endpoint: no URL; give one or more, for example http://127.0.0.1:8000/v1")
        self.urls = [url.rstrip("/") for url in urls]
        self.retries, self.max_failed_fraction = retries or RetryPolicy(), max_failed_fraction
        self._concurrency, self._jitter = concurrency, jitter
        self._load = [0] * len(urls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward endpoint", daemon=True)
        self._thread.start()
        self._client = httpx.AsyncClient(
            timeout=self.retries.timeout_s,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=concurrency),
            trust_env=False,
        )

    def get(self, path: str) -> Mapping[str, Any]:
        """Read one page of the first server that answers; `path` follows the base URL.

        Raises:
            RewardError: If no server answers.
        """
        return self._only(self._send("GET", path, None, lambda body: body))

    def ask(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Post one body to a server.

        Raises:
            RewardError: If no server answers.
        """
        return self._only(self._send("POST", path, body, lambda body: body))

    def ask_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        read: Callable[[Mapping[str, Any]], T],
        names: Sequence[str],
    ) -> list[T | Failed]:
        """Post B bodies and read each answer, in their order.

        Args:
            path: Follows the base URL.
            bodies: B requests.
            read: Turns an answer into what is wanted; a ValueError makes it a failed one.
            names: Of the samples, for errors.

        Raises:
            RewardError: As soon as more than `max_failed_fraction` of the requests have failed.
        """
        return self._run(self._all(path, bodies, read, names))

    def close(self) -> None:
        """Close connections and end the thread."""
        if not self._loop.is_closed():
            self._run(self._client.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _only(self, sending: Coroutine[Any, Any, Mapping[str, Any] | Failed]) -> Mapping[str, Any]:
        answer = self._run(sending)
        if isinstance(answer, Failed):
            raise RewardError(f"{', '.join(self.urls)}: {answer.reason}")
        return answer

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        read: Callable[[Mapping[str, Any]], T],
        names: Sequence[str],
    ) -> list[T | Failed]:
        answers: dict[int, T | Failed] = {}
        failed: list[str] = []
        slots = asyncio.Semaphore(self._concurrency)

        async def one(index: int) -> None:
            async with slots:
                answers[index] = answer = await self._send("POST", path, bodies[index], read)
            if isinstance(answer, Failed):
                failed.append(f"{names[index]}: {answer.reason}")
                if is_over_budget(len(failed), len(bodies), self.max_failed_fraction):
                    raise RewardError(
                        f"{len(failed)} of {len(bodies)} requests failed after {len(answers)} answers, the "
                        f"budget is {self.max_failed_fraction:.0%}: {'; '.join(failed[:5])}"
                    )

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(bodies)):
                    group.create_task(one(index))
        except* RewardError as errors:
            raise errors.exceptions[0] from None
        return [answers[index] for index in range(len(bodies))]

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[Mapping[str, Any]], T],
    ) -> T | Failed:
        """Send until there is an answer. All tries carry one id, so that a server can do the work once."""
        request_id = uuid.uuid4().hex
        policy = AsyncRetrying(
            retry=retry_if_exception_type(_TryAgain),
            stop=stop_after_attempt(self.retries.attempts),
            wait=self._wait_s,
            reraise=True,
        )
        try:
            async for attempt in policy:
                with attempt:
                    answer = await self._try(method, path, body, request_id)
            return read(answer)
        except _TryAgain as error:
            return Failed(reason=f"{error} in {self.retries.attempts} tries")
        except ValueError as error:
            return Failed(reason=str(error))

    def _wait_s(self, state: RetryCallState) -> float:
        longest = min(self.retries.max_wait_s, self.retries.first_wait_s * 2**state.attempt_number)
        error = state.outcome.exception() if state.outcome else None
        asked = error.wait_s if isinstance(error, _TryAgain) else 0.0
        return float(min(self.retries.max_wait_s, asked) + longest * self._jitter.random())

    async def _try(
        self, method: str, path: str, body: Mapping[str, Any] | None, request_id: str
    ) -> Mapping[str, Any]:
        """Ask the least busy server once."""
        place = min(range(len(self.urls)), key=lambda number: (self._load[number], self._jitter.random()))
        base = self.urls[place]
        url = base.removesuffix("/v1") + path.removeprefix("..") if path.startswith("..") else base + path
        self._load[place] += 1
        try:
            response = await self._client.request(
                method, url, json=body, headers={REQUEST_ID: request_id, "Idempotency-Key": request_id}
            )
        except httpx.TimeoutException as error:
            raise _TryAgain(f"no answer within {self.retries.timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        finally:
            self._load[place] -= 1
        if response.status_code in _RETRIED:
            raise _TryAgain(f"HTTP {response.status_code}", _asked_wait_s(response))
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}: {response.text[:200]}")
        if response.headers.get(REQUEST_ID, request_id) != request_id:
            raise _TryAgain("the answer to another request")
        answer = response.json()
        if not isinstance(answer, Mapping):
            raise ValueError("the answer is no JSON object")
        return answer


def _asked_wait_s(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0
