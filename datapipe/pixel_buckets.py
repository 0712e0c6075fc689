"""Batches of pictures of about one aspect ratio: each bucket has a size of its own, near one pixel count."""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.batching import CutBatches, cut_windows
from datapipe.errors import LoaderError
from datapipe.order import Positions, rank_bounds
from datapipe.whole_numbers import positive_numbers, whole_number

__all__ = ["PixelBatches", "PixelBuckets", "bucket_sizes"]

_MOST_PIXELS = 2**32


class PixelBuckets:
    """Cuts an epoch into batches of pictures of one bucket, in windows of 16,384 samples of the order.

    A picture goes to the bucket whose aspect ratio is nearest to its own, and is resized to the bucket's
    size. What does not fill a batch moves on to the next window. Batches follow from (seed, epoch) and not
    from ranks.
    """

    def __init__(
        self,
        sizes: ArrayLike,
        *,
        image_pixels: int,
        pixel_budget: int,
        multiple_of: int = 8,
        side_multiple: int = 32,
        max_aspect: float = 2.0,
    ) -> None:
        """Args:
        sizes: Int (rows of the view, 2), height and width of each picture, 1 or more.
        image_pixels: Most pixels of a bucket's size.
        pixel_budget: Most pixels of a global batch, over all ranks.
        multiple_of: Rows of a batch are a multiple of it; at least the number of ranks.
        side_multiple: Heights and widths of buckets are multiples of it.
        max_aspect: Longest side over shortest, 1 or more; longer pictures go to the outermost buckets.

        Raises:
            LoaderError: For numbers out of range, or if multiple_of pictures exceed the budget.
        """
        pictures = positive_numbers("sizes", sizes, ndim=2, wanted="a height and a width, 1 or more")
        if pictures.shape[1] != 2:
            raise LoaderError(
                f"sizes are of shape {pictures.shape}, wanted a height and a width for each row"
            )
        multiple_of = whole_number("multiple_of", multiple_of, 1)
        pixel_budget = whole_number("pixel_budget", pixel_budget, 1)
        self.sizes = bucket_sizes(image_pixels, side_multiple=side_multiple, max_aspect=max_aspect)
        largest = max(height * width for height, width in self.sizes)
        if largest * multiple_of > pixel_budget:
            raise LoaderError(
                f"{multiple_of} pictures of {largest} pixels are more than pixel_budget {pixel_budget}; "
                f"raise it, or lower image_pixels"
            )
        self.multiple_of, self._pixel_budget = multiple_of, pixel_budget
        aspects = np.log(pictures[:, 1] / pictures[:, 0])
        bucket_aspects = np.log([width / height for height, width in self.sizes])
        # The nearest one of a falling list, without a table of all pictures and all buckets.
        self.buckets = np.searchsorted(-(bucket_aspects[1:] + bucket_aspects[:-1]) / 2, -aspects)
        self.mean_stretch = float(np.exp(np.abs(aspects - bucket_aspects[self.buckets]).mean()))

    def batches(
        self, positions: Positions, *, num_rows: int, num_samples: int, seed: int, epoch: int, drop_last: bool
    ) -> PixelBatches:
        """Cut one epoch; what is left of each bucket is one batch, or left out with drop_last.

        Raises:
            LoaderError: If the view has another number of rows than there are sizes.
        """
        if num_rows != len(self.buckets):
            raise LoaderError(f"there are {len(self.buckets)} sizes for a view of {num_rows} rows")
        batches, left = cut_windows(positions, num_samples, seed=seed, epoch=epoch, cut=self._cut)
        if not drop_last:
            of = self.buckets[left]
            batches.extend(left[of == bucket] for bucket in np.unique(of).tolist())
        return PixelBatches(self, batches)

    def fingerprint(self) -> int:
        """Of the buckets of all rows and of all settings."""
        settings = f"{self.sizes} {self._pixel_budget} {self.multiple_of}".encode()
        return zlib.crc32(self.buckets.astype(np.int64).tobytes(), zlib.crc32(settings))

    def _cut(self, pool: NDArray[np.int64]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        batches: list[NDArray[np.int64]] = []
        left = [np.empty(0, np.int64)]
        of = self.buckets[pool]
        for bucket in np.unique(of).tolist():
            height, width = self.sizes[bucket]
            size = self._pixel_budget // (height * width) // self.multiple_of * self.multiple_of
            mine = pool[of == bucket]
            full = len(mine) // size * size
            batches.extend(mine[begin : begin + size] for begin in range(0, full, size))
            left.append(mine[full:])
        return batches, np.concatenate(left)


class PixelBatches(CutBatches):
    """The batches of one epoch; all pictures of a batch are of one bucket."""

    def __init__(self, buckets: PixelBuckets, batches: list[NDArray[np.int64]]) -> None:
        super().__init__(batches)
        self._buckets = buckets

    def share(self, positions: NDArray[np.int64], *, rank: int, world_size: int) -> tuple[int, int]:
        return rank_bounds(len(positions), rank=rank, world_size=world_size)

    def image_size(self, positions: NDArray[np.int64]) -> tuple[int, int] | None:
        return self._buckets.sizes[int(self._buckets.buckets[positions[0]])]


def bucket_sizes(image_pixels: int, *, side_multiple: int, max_aspect: float) -> list[tuple[int, int]]:
    """(height, width) of the buckets, from wide to tall; for each height the widest that fits.

    Raises:
        LoaderError: If no size of these sides has so few pixels.
    """
    if whole_number("image_pixels", image_pixels, 1) > _MOST_PIXELS:
        raise LoaderError(f"image_pixels is {image_pixels}, wanted {_MOST_PIXELS} or fewer")
    whole_number("side_multiple", side_multiple, 1)
    if not 1 <= max_aspect < math.inf:
        raise LoaderError(f"max_aspect is {max_aspect!r}, wanted a number of 1 or more")
    sizes = []
    tallest = math.isqrt(int(image_pixels * max_aspect)) + 1
    for height in range(side_multiple, tallest + 1, side_multiple):
        width = image_pixels // height // side_multiple * side_multiple
        if width and max(height / width, width / height) <= max_aspect:
            sizes.append((height, width))
    if not sizes:
        raise LoaderError(
            f"no size with sides of multiples of {side_multiple} has at most {image_pixels} pixels and an "
            f"aspect ratio of at most {max_aspect}"
        )
    return sizes
