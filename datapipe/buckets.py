"""Batches of sequences of about one length: a token budget, little padding, ranks balanced by cost."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.batching import CutBatches, cut_windows
from datapipe.errors import LoaderError
from datapipe.order import Positions
from datapipe.whole_numbers import positive_numbers, whole_number

__all__ = ["EVEN_LIMIT", "Balance", "TokenBatches", "TokenBuckets"]

_BISECTIONS: Final = 40
_MOST_LINEAR: Final = 1e12  # tokens; costs stay exact enough in float64
EVEN_LIMIT: Final = 1.05
"""Most that the slowest rank of a step shall cost, over the mean of the ranks."""
_ENOUGH_ROWS: Final = 16  # a rank with so many rows of a batch is evened out by giving it more or fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """What an epoch costs some number of ranks, when each pads its share to its longest row."""

    num_batches: int
    padding_fraction: float  # padded tokens that are no tokens of a row, 0..1
    slowest_over_mean: (
        float  # sum over batches of the slowest rank's cost over that of the mean cost, 1 or more
    )
    even_fraction: float  # share of the batches whose slowest rank costs at most 1.05 x the mean, 0..1
    worst_over_mean: float  # slowest rank's cost over the mean cost in the least even batch, 1 or more


class TokenBuckets:
    """Cuts an epoch into batches of neighbours in length.

    Windows of 16,384 samples of the order are sorted by length, cut so that rows x longest row is at most the
    budget, and the batches of a window change places. A batch of few rows that differ too much in cost to be
    shared evenly is made smaller; a row that is too long for all its neighbours, and what does not fill a
    batch, moves on to the next window. Batches follow from (seed, epoch) and not from ranks. Inside a batch,
    ranks get neighbours in length, cut so that the costliest share is as cheap as can be. Cost of a padded
    row: length^2 + linear x length.
    """

    def __init__(
        self, lengths: ArrayLike, *, token_budget: int, multiple_of: int = 8, linear: float = 6144.0
    ) -> None:
        """Args:
        lengths: Int (rows of the view,), tokens of each row, 1 or more.
        token_budget: Most padded tokens of a global batch, over all ranks.
        multiple_of: Rows of a batch are a multiple of it, so that few long rows are shared evenly. Any rank
            count up to it can run; those that divide it are balanced best.
        linear: Tokens at which the linear part costs as much as attention; about 6 x the model's width.

        Raises:
            LoaderError: For numbers out of range, or if multiple_of of the longest rows exceed the budget.
        """
        self.lengths = positive_numbers("lengths", lengths, ndim=1, wanted="a list of lengths of 1 or more")
        multiple_of = whole_number("multiple_of", multiple_of, 1)
        token_budget = whole_number("token_budget", token_budget, 1)
        if not isinstance(linear, int | float) or not 0 <= linear <= _MOST_LINEAR:
            raise LoaderError(f"linear is {linear!r}, wanted a number of tokens, 0 to {_MOST_LINEAR:g}")
        longest = int(self.lengths.max(initial=1))
        if longest * multiple_of > token_budget:
            raise LoaderError(
                f"row {int(self.lengths.argmax())} of the view has {longest} tokens, and {multiple_of} such "
                f"rows are more than token_budget {token_budget}; raise it or leave out long rows"
            )
        self.token_budget, self.multiple_of, self.linear = token_budget, multiple_of, linear

    def batches(
        self, positions: Positions, *, num_rows: int, num_samples: int, seed: int, epoch: int, drop_last: bool
    ) -> TokenBatches:
        """Cut one epoch; takes the time of sorting it, and 8 bytes of memory per sample.

        Raises:
            LoaderError: If the view has another number of rows than there are lengths.
        """
        if num_rows != len(self.lengths):
            raise LoaderError(f"there are {len(self.lengths)} lengths for a view of {num_rows} rows")
        batches, left = cut_windows(positions, num_samples, seed=seed, epoch=epoch, cut=self._cut)
        forced, left = self._cut(left, must_be_even=False)
        batches += forced
        if len(left) and not drop_last:
            batches.append(left)
        return TokenBatches(self, batches)

    def fingerprint(self) -> int:
        """Of the lengths and of all settings."""
        settings = f"even {self.token_budget} {self.multiple_of} {self.linear}".encode()
        return zlib.crc32(self.lengths.tobytes(), zlib.crc32(settings))

    def cost(self, length: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cost of a row padded to a length, in units of length squared."""
        return length.astype(np.float64) * (length + self.linear)

    def _cut(
        self, pool: NDArray[np.int64], *, must_be_even: bool = True
    ) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Full batches of a pool, and the rest; both from long to short."""
        pool = pool[np.argsort(-self.lengths[pool], kind="stable")]
        lengths = self.lengths[pool]
        costs = self.cost(lengths)
        batches, passed_over, begin = [], [], 0
        while begin < len(pool):
            most = self.token_budget // int(lengths[begin]) // self.multiple_of * self.multiple_of
            if begin + most > len(pool):
                break
            size = self._even_size(costs[begin : begin + most]) if must_be_even else most
            if size:
                batches.append(pool[begin : begin + size])
            else:
                passed_over.append(begin)
            begin += size or 1
        return batches, pool[[*passed_over, *range(begin, len(pool))]]

    def _even_size(self, costs: NDArray[np.float64]) -> int:
        """The most rows, a multiple of `multiple_of`, that so many ranks share evenly; 0 for none."""
        if len(costs) >= _ENOUGH_ROWS * self.multiple_of:
            return len(costs)
        for size in range(len(costs), 0, -self.multiple_of):
            dearest = costs[: size : size // self.multiple_of]
            if dearest[0] <= EVEN_LIMIT * dearest.mean():
                return size
        return 0


class TokenBatches(CutBatches):
    """The batches of one epoch; rows of a batch are sorted from long to short."""

    def __init__(self, buckets: TokenBuckets, batches: list[NDArray[np.int64]]) -> None:
        super().__init__(batches)
        self._buckets = buckets

    def share(self, positions: NDArray[np.int64], *, rank: int, world_size: int) -> tuple[int, int]:
        cuts = self._cuts(positions, world_size)
        return cuts[rank], cuts[rank + 1]

    def balance(self, world_size: int) -> Balance:
        """Padding and balance of the whole epoch on some number of ranks."""
        tokens = int(self._buckets.lengths[self._order].sum())
        padded, slowest, mean = 0, [], []
        for index in range(len(self._ends)):
            batch = self.take(*self.bounds(0, index))
            cuts = np.array(self._cuts(batch, world_size))
            sizes = np.diff(cuts)
            longest = self._buckets.lengths[batch[np.minimum(cuts[:-1], len(batch) - 1)]]
            costs = sizes * self._buckets.cost(longest)
            padded += int((sizes * longest).sum())
            slowest.append(float(costs.max()))
            mean.append(float(costs.mean()))
        ratios = np.array(slowest) / np.array(mean)
        return Balance(
            num_batches=len(ratios),
            padding_fraction=1 - tokens / padded if padded else 0.0,
            slowest_over_mean=sum(slowest) / sum(mean) if mean else 1.0,
            even_fraction=float((ratios <= EVEN_LIMIT).mean()) if mean else 1.0,
            worst_over_mean=float(ratios.max(initial=1.0)),
        )

    def _cuts(self, batch: NDArray[np.int64], world_size: int) -> list[int]:
        """Bisect the cost that no share may exceed; the least one that is enough gives the shares."""
        costs = self._buckets.cost(self._buckets.lengths[batch])
        low, high = 0.0, float((len(batch) + 1) * costs[0])
        cuts = _cuts_below(costs, high, world_size)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            tried = _cuts_below(costs, middle, world_size)
            if tried[-1] == len(batch):
                high, cuts = middle, tried
            else:
                low = middle
        return cuts


def _cuts_below(costs: NDArray[np.float64], limit: float, world_size: int) -> list[int]:
    """Fill one share after the other up to a cost, and leave a row for each rank to come."""
    cuts = [0]
    for ranks_left in range(world_size - 1, -1, -1):
        begin = cuts[-1]
        most = max(len(costs) - begin - ranks_left, min(1, len(costs) - begin))
        cuts.append(begin + (min(int(limit // costs[begin]), most) if begin < len(costs) else 0))
    return cuts
