from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.errors import RolloutError
from unirl.rollout.vllm_requests import AllowedIds, TokenAnswer, TokenRequest


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=3))
def test_spans_say_what_masks_say(masks: list[list[bool]]) -> None:
    places = torch.arange(len(masks))
    allowed = AllowedIds.from_masks(torch.tensor(masks), places)
    assert [[allowed.allows(place, i) for i in range(7)] for place in range(len(masks))] == masks


def test_one_set_holds_everywhere_without_places() -> None:
    allowed = AllowedIds.from_masks(
        torch.tensor([[True, False, True, True]]), torch.zeros(0, dtype=torch.int64)
    )
    assert allowed.at(0) == allowed.at(99) == ((0, 1), (2, 4))


def test_requests_and_answers_survive_json() -> None:
    request = TokenRequest(
        prompts=((1, 2), (3,)),
        unconditional=((1,), (1,)),
        seeds=(2**63 - 1, 0, 5, 6),
        max_new_tokens=3,
        temperature=0.7,
        guidance=2.5,
        allowed=AllowedIds(masks=(((0, 4),), ((7, 8),)), places=(0, 0, 1)),
        end_id=None,
        written=((), (1,), (2, 3), ()),
        limits=(3, 2, 1, 3),
    )
    assert request.group_size == 2
    assert [(request.begun(row), request.limit(row)) for row in (1, 3)] == [((1,), 2), ((), 3)]
    assert TokenRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    logprob = float(torch.tensor(0.1).log())
    answer = TokenAnswer(ids=((1,), (2, 3)), logprobs=((logprob,), (-1.0, -2.0)), policy_version=3)
    assert TokenAnswer.from_json(json.loads(json.dumps(answer.to_json()))) == answer


def test_what_is_added_stands_behind_what_was_written() -> None:
    """Row ends at places 2 and 5: ids 7 there, ids 0 to 3 elsewhere."""
    request = TokenRequest(
        prompts=((9,), (9,)),
        seeds=(0, 1),
        max_new_tokens=6,
        temperature=1.0,
        guidance=1.0,
        allowed=AllowedIds(masks=(((0, 4),), ((7, 8),)), places=(0, 0, 1, 0, 0, 1)),
        end_id=None,
        written=((1, 2), ()),
        limits=(3, 3),
    )

    def answer(*ids: tuple[int, ...]) -> TokenAnswer:
        return TokenAnswer(ids=ids, logprobs=tuple((-1.0,) * len(row) for row in ids), policy_version=0)

    answer((7, 3, 3), (3, 3, 7)).check(request)
    with pytest.raises(RolloutError, match="row 0, token 2: the engine drew id 3"):
        answer((3, 3, 7), (3, 3, 7)).check(request)
    with pytest.raises(RolloutError, match="row 0: a picture has 3 more image tokens, the engine drew 2"):
        answer((7, 3), (3, 3, 7)).check(request)
    with pytest.raises(RolloutError, match="row 1, token 3"):
        answer((7, 3, 3), (3, 3, 7, 1)).check(request)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_logprobs_that_are_no_numbers_are_refused_with_a_remedy(logprob: float) -> None:
    request = TokenRequest(
        prompts=((9,),),
        seeds=(0,),
        max_new_tokens=1,
        temperature=1.0,
        guidance=1.0,
        allowed=AllowedIds(masks=(((0, 4),),)),
        end_id=None,
    )
    with pytest.raises(RolloutError, match=r"row 0: log-probs .* are not all finite.*last good checkpoint"):
        TokenAnswer(ids=((1,),), logprobs=((logprob,),), policy_version=0).check(request)
    TokenAnswer(ids=((1,),), logprobs=((1e-6,),), policy_version=0).check(request)  # of rounding
    with pytest.raises(RolloutError, match=r"row 0: a log-prob is 0\.5, above 0"):
        TokenAnswer(ids=((1,),), logprobs=((0.5,),), policy_version=0).check(request)
