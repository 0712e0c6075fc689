"""The server and its client, over loopback, with an engine that needs no vLLM."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.errors import ConfigError, RolloutError
from unirl.rollout.server import make_app, serve
from unirl.rollout.server_client import TOKEN_VARIABLE, RemoteVllm
from unirl.rollout.vllm_requests import (
    AllowedIds,
    Checksums,
    EngineInfo,
    TokenAnswer,
    TokenRequest,
    WeightBucket,
)
from unirl.rollout.weight_sync_checksums import checksum
from unirl.rollout.weight_sync_memory import Entry, map_block, tensors_in

uvicorn = pytest.importorskip("uvicorn", reason="the server needs the extra serve")
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

TOKEN = "secret"


class FakeEngine:
    """Keeps the weights that come and answers with the seeds."""

    def __init__(self) -> None:
        self.info = EngineInfo(endpoint="in process", dtype="float32", checksum="xxh3", policy_version=-1)
        self.held: dict[str, Tensor] = {}

    def generate(self, request: TokenRequest, *, step: int) -> TokenAnswer:
        if step < 0:
            raise RolloutError("the engine has random weights")
        return TokenAnswer(
            ids=tuple((seed,) for seed in request.seeds),
            logprobs=tuple((-0.1,) for _ in request.seeds),
            policy_version=self.info.policy_version,
        )

    def begin_update(self, *, step: int) -> None:
        self.held.clear()

    def put(self, bucket: WeightBucket, *, step: int) -> dict[str, Checksums]:
        return self._keep(bucket.weights)

    def put_shared(
        self, path: Path, num_bytes: int, entries: Sequence[Mapping[str, Any]]
    ) -> dict[str, Checksums]:
        return self._keep(
            tensors_in(map_block(path, num_bytes), [Entry.from_json(dict(entry)) for entry in entries])
        )

    def backend(self, method: str, values: Mapping[str, Any], *, step: int) -> None:
        """The bytes would come another way."""

    def learn(self, shapes: Mapping[str, Sequence[int]], *, step: int) -> None:
        self.held = {name: torch.zeros(*shape) for name, shape in shapes.items()}

    def checksums(self, *, step: int) -> dict[str, str]:
        return {name: checksum(tensor, "xxh3") for name, tensor in self.held.items()}

    def finish_update(self, version: int) -> None:
        self.info = replace(self.info, policy_version=version)

    def _keep(self, weights: Sequence[tuple[str, Tensor]]) -> dict[str, Checksums]:
        self.held.update((name, tensor.clone()) for name, tensor in weights)
        sums = {name: checksum(self.held[name], "xxh3") for name, _ in weights}
        return {name: Checksums(sent=held, held=held) for name, held in sums.items()}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with served(make_app(engine, token=TOKEN)) as found:
        yield found


@contextmanager
def served(app: Any) -> Iterator[str]:
    config = uvicorn.Config(app, port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def some_request() -> TokenRequest:
    return TokenRequest(
        prompts=((1, 2),),
        seeds=(3, 4),
        max_new_tokens=1,
        temperature=1.0,
        guidance=1.0,
        allowed=AllowedIds(masks=(((0, 9),),)),
        end_id=None,
    )


@pytest.mark.parametrize("shared_memory", [True, False])
def test_weights_arrive_whole_and_answers_have_their_version(
    url: str, engine: FakeEngine, shared_memory: bool
) -> None:
    client = RemoteVllm(url, token=TOKEN, shared_memory=shared_memory)
    assert (client.info.endpoint, client.info.policy_version) == (url, -1)
    buckets = [
        WeightBucket(weights=[("a", torch.randn(100)), ("b", torch.randn(2, 3))]),
        WeightBucket(weights=[("c", torch.randn(3000))]),
    ]
    client.begin_update(step=4)
    for bucket in buckets:
        sums = client.put(bucket, step=4)
        assert all(pair.sent == pair.held for pair in sums.values()) and len(sums) == len(bucket.weights)
    client.finish_update(4)
    sent = [pair for bucket in buckets for pair in bucket.weights]
    assert all(torch.equal(engine.held[name], tensor) for name, tensor in sent)
    answer = client.generate(some_request(), step=4)
    assert (answer.ids, answer.policy_version) == (((3,), (4,)), 4)
    client.close()


def test_an_engines_error_reaches_the_trainer_with_its_place(url: str) -> None:
    client = RemoteVllm(url, token=TOKEN)
    with pytest.raises(RolloutError, match=rf"{url}/generate, step 2: status 400.*random weights"):
        client.generate(some_request(), step=2)
    client.close()


def test_another_trainers_weights_are_noticed(url: str, engine: FakeEngine) -> None:
    client = RemoteVllm(url, token=TOKEN)
    engine.finish_update(7)
    with pytest.raises(RolloutError, match="policy version 7, this trainer synced -1"):
        client.generate(some_request(), step=2)
    client.close()


def test_another_trainers_weights_of_the_same_version_are_noticed(url: str) -> None:
    mine, other = RemoteVllm(url, token=TOKEN), RemoteVllm(url, token=TOKEN)
    for client in (mine, other):
        client.begin_update(step=4)
        client.finish_update(4)
    with pytest.raises(RolloutError, match=r"generate, step 4: .*not those of this trainer's last sync"):
        mine.generate(some_request(), step=4)
    assert other.generate(some_request(), step=4).policy_version == 4
    mine.close()
    other.close()


def test_two_syncs_at_the_same_time_are_noticed(url: str) -> None:
    mine, other = RemoteVllm(url, token=TOKEN), RemoteVllm(url, token=TOKEN)
    bucket = WeightBucket(weights=[("a", torch.randn(100))])
    mine.begin_update(step=4)
    mine.put(bucket, step=4)
    other.begin_update(step=4)
    for call in (lambda: mine.put(bucket, step=4), lambda: mine.finish_update(4)):
        with pytest.raises(RolloutError, match=r"step 4: .*another trainer began to sync"):
            call()
    other.put(bucket, step=4)
    other.finish_update(4)
    mine.close()
    other.close()


def test_vllms_own_transfers_have_updates_too(url: str) -> None:
    mine, other = RemoteVllm(url, token=TOKEN), RemoteVllm(url, token=TOKEN)
    other.begin_update(step=0)
    other.finish_update(0)
    mine.learn({"a": (2, 3)}, step=1)
    for version in (1, 2):
        mine.backend("start_weight_update", {}, step=version)
        mine.backend("finish_weight_update", {}, step=version)
        assert mine.checksums(step=version) == {"a": checksum(torch.zeros(2, 3), "xxh3")}
        mine.finish_update(version)
        assert mine.generate(some_request(), step=version).policy_version == version
    with pytest.raises(RolloutError, match="not those of this trainer's last sync"):
        other.generate(some_request(), step=2)
    mine.close()
    other.close()


def test_a_client_that_only_samples_takes_what_is_there(url: str) -> None:
    trainer = RemoteVllm(url, token=TOKEN)
    trainer.begin_update(step=4)
    trainer.finish_update(4)
    reader = RemoteVllm(url, token=TOKEN)
    assert reader.generate(some_request(), step=4).policy_version == 4
    trainer.close()
    reader.close()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AssertionError("wrong shape"), "status 400.*AssertionError: wrong shape"),
        (OSError(28, "No space left on device"), "status 400.*No space left"),
    ],
)
def test_whatever_an_engine_raises_reaches_the_trainer(
    url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(request: TokenRequest, *, step: int) -> TokenAnswer:
        raise error

    client = RemoteVllm(url, token=TOKEN)
    monkeypatch.setattr(engine, "generate", fail)
    with pytest.raises(RolloutError, match=rf"{url}/generate, step 3: {message}"):
        client.generate(some_request(), step=3)
    client.close()


@pytest.mark.parametrize(("answer", "status"), [("<html>", 200), ('{"name": "x"}', 200), ("[1]", 200)])
def test_a_server_of_another_kind_is_told(answer: str, status: int) -> None:
    async def other(request: Request) -> Response:
        return Response(answer, status_code=status)

    is_told = pytest.raises(RolloutError, match=r"/info.*this is no `unirl rollout serve`")
    with served(Starlette(routes=[Route("/info", other)])) as url, is_told:
        RemoteVllm(url, token=TOKEN)


GOOD = {"ids": [[1], [2]], "logprobs": [[-0.1], [-0.2]], "policy_version": 0}


@pytest.mark.parametrize(
    "answer",
    [
        *({}, None, [], "x", {**GOOD, "ids": None}, {**GOOD, "ids": [1, 2]}, {**GOOD, "ids": [[1.5], [2]]}),
        *({**GOOD, "logprobs": [["-0.1"], [-0.2]]}, {**GOOD, "logprobs": [[None], [0]]}),
        {**GOOD, "policy_version": "0"},
    ],
)
def test_answers_of_another_form_are_told_with_their_place(
    url: str, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    client = RemoteVllm(url, token=TOKEN)
    monkeypatch.setattr(client, "_call", lambda *_, **__: answer)
    with pytest.raises(RolloutError, match=r"/generate, step 5: answered .*this is no `unirl rollout serve`"):
        client.generate(some_request(), step=5)
    with pytest.raises(RolloutError, match=r"/weights/begin, step 5: answered"):
        client.begin_update(step=5)
    client.close()


def test_a_body_that_cannot_be_unpacked_is_told() -> None:
    async def packed(request: Request) -> Response:
        return Response(b"no gzip", headers={"content-encoding": "gzip"})

    is_told = pytest.raises(RolloutError, match=r"/info: .*decompressing")
    with served(Starlette(routes=[Route("/info", packed)])) as url, is_told:
        RemoteVllm(url, token=TOKEN)


@pytest.mark.parametrize("token", ["t\u00e9", "a\nb", "  "])
def test_a_token_that_no_request_can_carry_is_told_and_not_shown(url: str, token: str) -> None:
    with pytest.raises(ConfigError, match="the token of the rollout server") as caught:
        RemoteVllm(url, token=token)
    assert token not in str(caught.value) or token == "  "
    RemoteVllm(url, token=f"{TOKEN}\n").close()  # as read from a file


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), None, "9"])
def test_a_time_limit_is_a_number_of_seconds(url: str, timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="wanted seconds, more than 0"):
        RemoteVllm(url, token=TOKEN, timeout_s=timeout_s)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8300", "", "http://", "ftp://gpu:8300", "http://[::1", "http://gpu:eighty", "http://\0"],
)
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a rollout server; wanted one such as"):
        RemoteVllm(url, token=TOKEN)


def test_a_taken_port_is_told_before_the_engine_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1, port {port}: .*another --port"):
            serve(tmp_path, token=TOKEN, port=port)


def test_a_token_is_needed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RolloutError, match="status 401"):
        RemoteVllm(url, token="wrong")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        RemoteVllm(url)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(RolloutError, match=r"http://127.0.0.1:9/info.*is the server running"):
        RemoteVllm("http://127.0.0.1:9", token=TOKEN)
