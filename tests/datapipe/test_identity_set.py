"""Sets of identities in little memory: the same answers as a set of Python."""

from __future__ import annotations

import random

import numpy as np

from datapipe.identity_set import IdentitySet


def test_members_are_found_over_many_runs() -> None:
    numbers = random.Random(0)
    members = [numbers.getrandbits(64) for _ in range(30_000)]
    found = IdentitySet()
    assert 5 not in found and not found.has_any([5]) and not found.has_any([])
    for member in members[:25_000]:
        assert found.add(member)
        assert not found.add(member)
    found.add_new(members[25_000:])
    assert len(found) == len(set(members))
    assert all(member in found for member in members[::97]) and 2**64 - 1 not in found
    assert found.has_any([1, members[0]]) and found.has_any([members[-1]])
    assert not found.has_any(member ^ 1 for member in members[:100])
    asked = np.array([members[0] ^ 1, members[29_999], 5, members[7]], np.uint64)
    assert found.members(asked).tolist() == [members[29_999], members[7]]
    assert found.members(asked[:0]).tolist() == [] == IdentitySet().members(asked).tolist()
