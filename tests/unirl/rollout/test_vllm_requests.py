from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

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
    )
    assert request.group_size == 2
    assert TokenRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    logprob = float(torch.tensor(0.1).log())
    answer = TokenAnswer(ids=((1,), (2, 3)), logprobs=((logprob,), (-1.0, -2.0)), policy_version=3)
    assert TokenAnswer.from_json(json.loads(json.dumps(answer.to_json()))) == answer
