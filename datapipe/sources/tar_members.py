"""The members of an archive, and which of them share a key, in about 70 bytes a member."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["Group", "Groups", "Member", "Members"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One regular file in a tar."""

    name: str  # with forward slashes, without "." and empty parts
    offset: int  # of its header, bytes
    offset_data: int  # of its content, bytes
    size: int  # bytes


class Members:
    """A list of members that keeps them as numbers and one long text."""

    def __init__(self) -> None:
        self._numbers = array("q")  # offset, offset_data and size of each
        self._ends = array("q", [0])  # of the names
        self._names = bytearray()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, position: int) -> Member:
        offset, offset_data, size = self._numbers[3 * position : 3 * position + 3]
        return Member(name=self.name(position), offset=offset, offset_data=offset_data, size=size)

    def name(self, position: int) -> str:
        """The name of one member."""
        return self._names[self._ends[position] : self._ends[position + 1]].decode()

    def add(self, member: Member) -> None:
        """Append one."""
        self._names += member.name.encode()
        self._numbers.extend((member.offset, member.offset_data, member.size))
        self._ends.append(len(self._names))

    def drop_last(self) -> None:
        """Take the last one away."""
        self._ends.pop()
        del self._names[self._ends[-1] :]
        del self._numbers[-3:]


@dataclass(kw_only=True, slots=True)
class Group:
    """Members that share a key."""

    members: list[tuple[str, Member]] = field(default_factory=list)  # field name, member
    num_runs: int = 0  # more than 1: the members do not stand side by side
    last_position: int = -2

    def add(self, position: int, name: str, member: Member) -> None:
        """Take the next one, in the order of the archive."""
        self.num_runs += position != self.last_position + 1
        self.last_position = position
        self.members.append((name, member))


class Groups:
    """The groups of an archive by the place of their first members, made while they are asked for."""

    def __init__(self, members: Members, split: Callable[[str], tuple[str, str]]) -> None:
        """Args:
        members: All of the archive. Hidden ones and WebDataset's own notes are left out.
        split: Tells key and field name of a name.
        """
        self._members, self._split = members, split
        hashes, positions = array("Q"), array("I")
        for position in range(len(members)):
            name = members.name(position)
            if not _is_hidden(name):
                hashes.append(xxhash.xxh3_64_intdigest(split(name)[0].encode()))
                positions.append(position)
        keys = np.frombuffer(hashes, np.uint64)
        order = np.argsort(keys, kind="stable")
        self._positions: NDArray[np.uint32] = np.frombuffer(positions, np.uint32)[order]
        keys = keys[order]
        del order, hashes, positions
        is_first = np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)]
        starts = np.flatnonzero(is_first).astype(np.uint32)
        by_place = np.argsort(self._positions[starts], kind="stable").astype(np.uint32)
        self._starts = starts[by_place]
        self._stops = np.append(starts[1:], np.uint32(len(keys)))[by_place]

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[str, Group]]:
        for start, stop in zip(self._starts, self._stops):  # numbers of numpy: a list of them is large
            found: dict[str, Group] = {}  # more than one when keys share a hash
            for position in self._positions[start:stop].tolist():
                member = self._members[position]
                key, name = self._split(member.name)
                found.setdefault(key, Group()).add(position, name, member)
            yield from found.items()


def _is_hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".") or (name.startswith("__") and "__/" in name)
