"""Which rows go through the model together: packed under a budget of tokens, dealt out over ranks."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["RowLength", "deal_rows", "pack_rows", "row_cost"]

RowLength = tuple[int, int]
"""Prompt tokens and response tokens of one row."""


def row_cost(length: RowLength, width: int) -> int:
    """What one row costs a decoder, in units of one layer's attention work on one pair of tokens.

        cost = n^2 + 6 D n,   n = prompt + response tokens

    A layer of width D with a feed-forward part of 4 D spends 24 D^2 n multiplications on its matrices and
    4 D n^2 on attention; their ratio is 6 D / n.

    Args:
        length: Of the row.
        width: D.
    """
    tokens = sum(length)
    return tokens * tokens + 6 * width * tokens


def deal_rows(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal rows out so that every rank has about the same to do: the dearest first, to whom has least.

    Args:
        costs: Of each row.
        num_ranks: Ranks.

    Returns:
        Places in `costs` for each rank. Equal costs go in the order of the rows and the ranks, so all ranks
        that see the same costs deal alike.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies": no rank has more than 4/3 of the best.
    """
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        rank = totals.index(min(totals))
        hands[rank].append(row)
        totals[rank] += costs[row]
    return hands


def pack_rows(lengths: Sequence[RowLength], budget: int, *, num_batches: int = 0) -> list[list[int]]:
    """Group rows of like length so that no micro-batch, padding included, holds more than `budget` tokens.

    Args:
        lengths: Of each row.
        budget: Rows times (longest prompt + longest response) of a micro-batch. A row that is longer alone
            gets a micro-batch of its own.
        num_batches: Make at least so many, by halving the largest; where there are fewer rows than that, the
            rest are empty.

    Returns:
        Places in `lengths` for each micro-batch, longest rows first.
    """
    batches: list[list[int]] = []
    prompt = response = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-sum(lengths[row]), -lengths[row][0])):
        wider, longer = max(prompt, lengths[row][0]), max(response, lengths[row][1])
        if batches and (len(batches[-1]) + 1) * (wider + longer) <= budget:
            batches[-1].append(row)
            prompt, response = wider, longer
        else:
            batches.append([row])
            prompt, response = lengths[row]
    while len(batches) < num_batches:
        largest = max(range(len(batches)), key=lambda i: len(batches[i]), default=None)
        if largest is None or len(batches[largest]) == 1:
            batches += [[] for _ in range(num_batches - len(batches))]
        else:
            rows = batches[largest]
            batches[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return batches
