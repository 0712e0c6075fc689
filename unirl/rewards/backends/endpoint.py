"""A vision-language model behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unirl.errors import ConfigError, RewardError
from unirl.rewards.backends.base import AnswerLogprobs, Generation, VlmRequest, distinct_sequences
from unirl.rewards.backends.replicas import Failed, Replicas, RetryPolicy
from unirl.rewards.backends.wire import (
    TOKEN_ID,
    first_choice,
    first_token_logprobs,
    messages_of,
    said_logprobs,
)

__all__ = ["EndpointBackend"]

CHAT = "/chat/completions"


class EndpointBackend:
    """Answers over HTTP.

    A server that has `/tokenize` and takes `logprob_token_ids` (vLLM's, and `unirl reward serve`) gives exact
    numbers. Any other is asked for the `top_logprobs` most likely tokens; an answer that is not among them
    gets the smallest of them as an upper bound.

    Args:
        urls: Base URLs of replicas of one model, each up to `/v1`.
        model: Name of the model; None takes the first that the server lists.
        token: Bearer token.
        concurrency: Requests under way at once, over all servers.
        retries: When to try again.
        max_failed_fraction: Share of one call's requests that may fail; one more stops the call at once.
        top_logprobs: How many likely tokens to ask for where ids cannot be asked for.
        version: Names the weights where the server does not; change it when they change.
        seed: Of the waits between tries.

    Raises:
        ConfigError: If there is no URL.
        RewardError: If no server answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str | None = None,
        token: str = "",
        concurrency: int = 32,
        retries: RetryPolicy | None = None,
        max_failed_fraction: float = 0.1,
        top_logprobs: int = 20,
        version: str = "",
        seed: int = 0,
    ) -> None:
        self._replicas = Replicas(
            urls,
            token=token,
            concurrency=concurrency,
            retries=retries,
            max_failed_fraction=max_failed_fraction,
            jitter=np.random.default_rng(seed),
        )
        self._top = top_logprobs
        card = self._card(model)
        self.model = str(card["id"])
        self._identity = f"endpoint/{self.model}/{version or card.get('identity', '')}"
        self._ids: dict[str, tuple[int, ...]] = {}
        self._tells_ids = self._has_ids()

    @property
    def identity(self) -> str:
        """Names the model, and its weights where the server or the user says which."""
        return self._identity

    def answer_logprobs(
        self, requests: Sequence[VlmRequest], answers: Sequence[Sequence[str]]
    ) -> AnswerLogprobs:
        """Say how likely each answer comes next; see `VlmBackend`."""
        if not self._tells_ids:
            return self._by_text(requests, answers)
        sequences = self._sequences(answers)
        logprobs = np.full((len(requests), len(answers)), np.nan)
        read, problems = self._read(requests, sequences)
        for index in range(len(requests)):
            if index not in problems:
                logprobs[index] = [
                    np.logaddexp.reduce([_whole(ids, read, index) for ids in group]) for group in sequences
                ]
        return AnswerLogprobs(logprobs=logprobs, is_bound=np.zeros(logprobs.shape, bool), problems=problems)

    def generate(
        self,
        requests: Sequence[VlmRequest],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Let the model speak; see `VlmBackend`."""
        bodies = [
            {
                **self._body(request),
                "max_tokens": max_new_tokens,
                "temperature": temperature,
                "seed": int(np.random.default_rng([seed, index]).integers(2**31)),
                "stop": list(stop),
                "logprobs": True,
            }
            for index, request in enumerate(requests)
        ]
        said = self._replicas.ask_all(CHAT, bodies, _generation, [request.key for request in requests])
        return [Generation.none(answer.reason) if isinstance(answer, Failed) else answer for answer in said]

    def close(self) -> None:
        """Close the connections."""
        self._replicas.close()

    def _card(self, model: str | None) -> Mapping[str, Any]:
        cards = self._replicas.get("/models").get("data") or []
        if not cards:
            raise ConfigError(f"{self._replicas.urls[0]}: it lists no model")
        if model is None:
            return dict(cards[0])
        found = next((card for card in cards if card.get("id") == model), None)
        if found is None:
            names = ", ".join(str(card.get("id")) for card in cards)
            raise ConfigError(f"{self._replicas.urls[0]}: it has no model {model!r}; it has {names}")
        return dict(found)

    def _has_ids(self) -> bool:
        try:
            return bool(self._tokenize("yes"))
        except RewardError:
            return False

    def _tokenize(self, text: str) -> tuple[int, ...]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return tuple(self._replicas.ask("../tokenize", body).get("tokens") or ())

    def _body(self, request: VlmRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": messages_of(request)}
        if request.reply:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _sequences(self, answers: Sequence[Sequence[str]]) -> list[list[tuple[int, ...]]]:
        for spelling in (spelling for group in answers for spelling in group):
            if spelling not in self._ids:
                self._ids[spelling] = self._tokenize(spelling)
        unknown = self._ids.setdefault("\x00unknown", self._tokenize("\x00unknown"))
        found = []
        for group in answers:
            rows = [self._ids[spelling] for spelling in group]
            known = distinct_sequences([row for row in rows if row != unknown])
            if not known:
                raise ConfigError(
                    f"{self.model}: none of {', '.join(map(repr, group))} is in its vocabulary; give other "
                    "spellings"
                )
            found.append(known)
        return found

    def _read(
        self, requests: Sequence[VlmRequest], sequences: Sequence[Sequence[tuple[int, ...]]]
    ) -> tuple[dict[tuple[int, ...], list[Mapping[str, float] | Failed]], dict[int, str]]:
        """Log-probabilities of the tokens wanted after each start of a spelling, for each request."""
        wanted: dict[tuple[int, ...], set[int]] = {}
        for ids in (ids for group in sequences for ids in group):
            for length in range(len(ids)):
                wanted.setdefault(ids[:length], set()).add(ids[length])
        names = [request.key for request in requests]
        read: dict[tuple[int, ...], list[Mapping[str, float] | Failed]] = {}
        problems: dict[int, str] = {}
        for start, tokens in wanted.items():
            begun = self._text_of(start)
            extended = [replace(request, reply=request.reply + begun) for request in requests]
            bodies = [{**self._body(request), **_exactly(sorted(tokens))} for request in extended]
            read[start] = self._replicas.ask_all(CHAT, bodies, _named(tokens), names)
            for index, answer in enumerate(read[start]):
                if isinstance(answer, Failed):
                    problems[index] = answer.reason
        return read, problems

    def _text_of(self, tokens: tuple[int, ...]) -> str:
        if not tokens:
            return ""
        body = {"model": self.model, "tokens": list(tokens)}
        return str(self._replicas.ask("../detokenize", body).get("prompt", ""))

    def _by_text(self, requests: Sequence[VlmRequest], answers: Sequence[Sequence[str]]) -> AnswerLogprobs:
        """Numbers from the most likely tokens that the server names."""
        bodies = [
            {
                **self._body(request),
                "max_tokens": 1,
                "temperature": 1.0,
                "logprobs": True,
                "top_logprobs": self._top,
            }
            for request in requests
        ]
        names = [request.key for request in requests]
        read = self._replicas.ask_all(CHAT, bodies, first_token_logprobs, names)
        logprobs = np.full((len(requests), len(answers)), np.nan)
        is_bound = np.zeros(logprobs.shape, bool)
        problems: dict[int, str] = {}
        for index, named in enumerate(read):
            if isinstance(named, Failed):
                problems[index] = named.reason
                continue
            for column, group in enumerate(answers):
                found = [named[spelling] for spelling in dict.fromkeys(group) if spelling in named]
                is_bound[index, column] = not found
                logprobs[index, column] = np.logaddexp.reduce(found) if found else min(named.values())
        return AnswerLogprobs(logprobs=logprobs, is_bound=is_bound, problems=problems)


def _exactly(tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": True,
        "top_logprobs": len(tokens),
        "logprob_token_ids": list(tokens),
        "return_tokens_as_token_ids": True,
    }


def _named(tokens: set[int]) -> Any:
    names = {f"{TOKEN_ID}{token}" for token in tokens}

    def read(body: Mapping[str, Any]) -> Mapping[str, float]:
        found = first_token_logprobs(body)
        if missing := names - found.keys():
            raise ValueError(f"the answer says nothing of {', '.join(sorted(missing))}")
        return found

    return read


def _whole(
    ids: tuple[int, ...],
    read: Mapping[tuple[int, ...], Sequence[Mapping[str, float] | Failed]],
    index: int,
) -> float:
    """Log-probability of a spelling of several tokens."""
    total = 0.0
    for length, token in enumerate(ids):
        named = read[ids[:length]][index]
        total += math.nan if isinstance(named, Failed) else named[f"{TOKEN_ID}{token}"]
    return total


def _generation(body: Mapping[str, Any]) -> Generation:
    choice = first_choice(body)
    return Generation(
        text=str(choice["message"].get("content") or ""),
        token_logprobs=said_logprobs(choice),
        truncated=choice.get("finish_reason") == "length",
    )
