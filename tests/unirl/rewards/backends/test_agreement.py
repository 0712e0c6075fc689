"""One model, asked in process and over a server: the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_endpoint import serving
from unirl.errors import ConfigError, ShapeError
from unirl.rewards.backends import CLIP_MARK, IMAGE_MARK, VlmRequest
from unirl.rewards.backends.endpoint import EndpointBackend
from unirl.rewards.backends.prompts import PaddedPrompts
from unirl.rewards.backends.qwen import TransformersBackend
from unirl.rewards.backends.server import make_app

ANSWERS = (("yes", "Yes", " yes"), ("no",), ("yes no", "red"))


def picture(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def questions() -> list[VlmRequest]:
    words = ("a red circle", "a small green star on the left", "", "zebra")
    one = [
        VlmRequest(
            key=f"one-{row}",
            text=f"{IMAGE_MARK} does this picture show {words[row % 4]} ?",
            images=(picture(row % 5, 32, 32),),
        )
        for row in range(8)
    ]
    clip = picture(9, 3, 32, 16)
    pair = (picture(10, 16, 32), picture(11, 32, 32))
    return [
        *one,
        VlmRequest(key="clip", text=f"{CLIP_MARK} show ?", clips=(clip,)),
        VlmRequest(key="two", text=f"{IMAGE_MARK} or {IMAGE_MARK} ?", images=pair),
        VlmRequest(key="both", text=f"{IMAGE_MARK} {CLIP_MARK} ?", images=pair[:1], clips=(clip,)),
        VlmRequest(key="words", text="does this show ?", reply=" a red"),
    ]


@pytest.fixture(scope="module")
def backend(tiny_vlm: Path) -> TransformersBackend:
    return TransformersBackend.load(tiny_vlm)


@pytest.fixture(scope="module")
def url(backend: TransformersBackend) -> Iterator[str]:
    with serving(make_app(backend, name="toy", token="secret")) as address:
        yield address


def test_alone_and_in_company_the_answers_are_the_same(backend: TransformersBackend) -> None:
    together = backend.answer_logprobs(questions(), ANSWERS)
    alone = [backend.answer_logprobs([request], ANSWERS).logprobs[0] for request in questions()]
    assert not together.problems
    np.testing.assert_allclose(together.logprobs, np.stack(alone), atol=1e-5)


def test_a_spelling_of_two_tokens_is_the_product_of_both(backend: TransformersBackend) -> None:
    first = questions()[:1]
    whole = backend.answer_logprobs(first, [("yes no",)]).logprobs[0, 0]
    yes = backend.answer_logprobs(first, [("yes",)]).logprobs[0, 0]
    begun = [VlmRequest(key="b", text=first[0].text, images=first[0].images, reply=" yes")]
    no = backend.answer_logprobs(begun, [("no",)]).logprobs[0, 0]
    assert whole == pytest.approx(yes + no, abs=1e-5)


def test_over_a_server_the_answers_are_the_same(backend: TransformersBackend, url: str) -> None:
    remote = EndpointBackend([url], token="secret")
    here, there = (
        backend.answer_logprobs(questions(), ANSWERS[:2]),
        remote.answer_logprobs(questions(), ANSWERS[:2]),
    )
    said, said_there = (
        model.generate(questions()[:3], max_new_tokens=4, temperature=0.0) for model in (backend, remote)
    )
    remote.close()
    np.testing.assert_allclose(there.logprobs, here.logprobs, atol=1e-4)
    assert not there.is_bound.any() and not there.problems
    assert [g.text for g in said_there] == [g.text for g in said]
    assert remote.identity == f"endpoint/toy/{backend.identity}"


def test_a_server_wants_its_token(url: str) -> None:
    with pytest.raises(Exception, match="HTTP 401"):
        EndpointBackend([url], token="wrong")


def test_what_cannot_be_asked_is_a_problem_and_not_a_number(backend: TransformersBackend) -> None:
    wrong = [
        VlmRequest(key="thin", text=IMAGE_MARK, images=(picture(0, 1, 300),)),
        VlmRequest(key="empty", text=IMAGE_MARK, images=(picture(0, 0, 8),)),
        VlmRequest(key="long", text="a " * 100),
        VlmRequest(key="sneaky", text="a <|image_pad|>"),
        *questions()[:1],
    ]
    answered = backend.answer_logprobs(wrong, ANSWERS)
    assert sorted(answered.problems) == [0, 1, 2, 3]
    assert np.isnan(answered.logprobs[:4]).all() and np.isfinite(answered.logprobs[4]).all()
    assert "sides differ" in answered.problems[0] and "the model takes 64" in answered.problems[2]


def test_an_answer_that_the_vocabulary_lacks_is_refused(backend: TransformersBackend) -> None:
    with pytest.raises(ConfigError, match="none of 'oui', 'Oui' is in its vocabulary"):
        backend.answer_logprobs(questions(), [("oui", "Oui")])


def test_padding_on_the_right_is_refused(backend: TransformersBackend) -> None:
    ids = np.zeros((2, 3), np.int64)
    mask = np.array([[True] * 3, [True, True, False]])
    prompts = PaddedPrompts(
        ids=ids, mask=mask, positions=np.zeros((3, 2, 3), np.int64), next_position=np.zeros(2, np.int64)
    )
    with pytest.raises(ShapeError, match="padded on the left"):
        backend.read(prompts, {})


def test_a_request_says_how_many_media_it_has() -> None:
    with pytest.raises(ShapeError, match="request q: 0 pictures but 1 marks"):
        VlmRequest(key="q", text=IMAGE_MARK)


def test_speaking_does_not_depend_on_the_company(backend: TransformersBackend) -> None:
    together = backend.generate(questions()[:3], max_new_tokens=5)
    alone = [backend.generate([request], max_new_tokens=5)[0] for request in questions()[:3]]
    assert [g.text for g in together] == [g.text for g in alone]
    np.testing.assert_allclose(together[0].token_logprobs, alone[0].token_logprobs, atol=1e-5)
    stopped = backend.generate(questions()[:1], max_new_tokens=5, stop=(together[0].text.split()[0],))
    assert stopped[0].text == "" and not stopped[0].truncated
