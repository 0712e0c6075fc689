"""The server of a reward model: what is wrong with one request stays with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faulty_endpoint import serving
from unirl.rewards.backends import VlmRequest
from unirl.rewards.backends.qwen import TransformersBackend
from unirl.rewards.backends.server import make_app

ASKED = {"messages": [{"role": "user", "content": "does this show ?"}], "max_tokens": 1, "logprobs": True}
FIVE = {**ASKED, "top_logprobs": 5}


class Stumbling(TransformersBackend):
    """Runs out of memory the first time that it is asked for five tokens."""

    has_stumbled = False

    def token_logprobs(
        self, requests: Sequence[VlmRequest], *, token_ids: Sequence[int] = (), top: int = 0
    ) -> list[dict[int, float] | str]:
        if top == 5 and not self.has_stumbled:
            self.has_stumbled = True
            raise RuntimeError("out of memory")
        return super().token_logprobs(requests, token_ids=token_ids, top=top)


@pytest.fixture
def client(tiny_vlm: Path) -> Iterator[httpx.Client]:
    backend = Stumbling.load(tiny_vlm)
    headers = {"Authorization": "Bearer secret"}
    with (
        serving(make_app(backend, name="toy", token="secret")) as url,
        httpx.Client(base_url=url, headers=headers, timeout=20.0, trust_env=False) as client,
    ):
        yield client


def ask(client: httpx.Client, body: Any, request_id: str = "") -> httpx.Response:
    return client.post("/chat/completions", json=body, headers={"X-Request-Id": request_id})


def test_what_the_model_raises_is_told_and_the_next_try_is_answered(client: httpx.Client) -> None:
    assert ask(client, FIVE, "one").status_code == 500
    answers = [ask(client, FIVE, request_id) for request_id in ("one", "one", "two")]
    assert [answer.status_code for answer in answers] == [200] * 3
    (choice,) = answers[0].json()["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprob_token_ids": [3, 10**6]}, "must be below"),
        ({"logprob_token_ids": [-1]}, "must be below"),
        ({"top_logprobs": 10**6}, "must be below"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "many"}, "many"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"seed": -1}, "seed -1"),
        ({"messages": []}, "wanted one of the user"),
        ({"messages": ["hello"]}, "get"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "no"}}]}]},
            "data:image/",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
                        ],
                    }
                ]
            },
            "no picture",
        ),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_the_reason(
    client: httpx.Client, change: dict[str, Any], words: str
) -> None:
    answer = ask(client, {**FIVE, **change})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
