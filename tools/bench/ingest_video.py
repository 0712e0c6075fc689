"""Clips of 16 frames at random start from short H.264 videos, two threads: ours beside the bare decoders.

The peers are programs as short as their documentation shows them, with one decoding thread each and, for
PyAV, one converter for all frames, which its own shortcut `to_ndarray` does not have. What the peers give
is compared with the numbers that the frames carry, because speed on the wrong frames is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import decord
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from datapipe.decode.video import VideoReader
from tools.bench.results import Row, median_row
from tools.video_clips import make_clip, numbered_picture, read_number

__all__ = [
    "CLIP_FRAMES",
    "DECODERS",
    "clip_rates",
    "exact_fraction",
    "make_videos",
    "processor_ms",
    "video_rows",
]

CLIP_FRAMES = 16
NUM_THREADS = 2  # that share the requests
NUM_FRAMES = 150
WIDTH, HEIGHT = 320, 240

Clip = NDArray[np.uint8]
Decoder = Callable[[Path, int], Clip]


@dataclass(frozen=True, slots=True)
class Request:
    """Frames `start` to `start + CLIP_FRAMES` of a file."""

    path: Path
    start: int


def make_videos(folder: Path, count: int) -> list[Path]:
    """Encode moving textures with noise, 5 s each, with the encoder's own settings for groups and B-frames.
    Files that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03d}.mp4" for number in range(count)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_make_video, paths, range(count)))
    return paths


def _make_video(path: Path, seed: int) -> None:
    if path.exists():
        return
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 255, (HEIGHT // 8 + 20, WIDTH // 8 + 20, 3), np.uint8)
    size = (8 * coarse.shape[1], 8 * coarse.shape[0])
    ground = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.int16)
    pictures = []
    for number in range(NUM_FRAMES):
        x, y = (int(70 + 60 * np.sin(number / 20 + seed + turn)) for turn in (0.0, 1.5))
        noise = generator.integers(-6, 6, (HEIGHT, WIDTH, 1))
        picture = np.clip(ground[y : y + HEIGHT, x : x + WIDTH] + noise, 0, 255).astype(np.uint8)
        bars = numbered_picture(number, width=WIDTH, height=HEIGHT)
        picture[HEIGHT * 2 // 3 : HEIGHT * 5 // 6] = bars[HEIGHT * 2 // 3 : HEIGHT * 5 // 6]
        pictures.append(picture)
    clip = make_clip(NUM_FRAMES, width=WIDTH, height=HEIGHT, pictures=pictures, options={"preset": "medium"})
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(clip)
    temporary.rename(path)


def _ours(path: Path, start: int) -> Clip:
    with VideoReader(path) as reader:
        return reader.frames(range(start, start + CLIP_FRAMES))


def _decord(path: Path, start: int) -> Clip:
    reader = decord.VideoReader(str(path), num_threads=1)
    clip: Clip = reader.get_batch(range(start, start + CLIP_FRAMES)).asnumpy()
    return clip


def _pyav(path: Path, start: int) -> Clip:
    converter = VideoReformatter()
    found: list[Clip] = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_type, stream.codec_context.thread_count = "NONE", 1
        first = int(Fraction(start, 30) / stream.time_base)
        container.seek(first, stream=stream)
        for frame in container.decode(stream):
            if frame.pts >= first:
                found.append(converter.reformat(frame, format="rgb24", threads=1).to_ndarray())
            if len(found) == CLIP_FRAMES:
                break
    return np.stack(found)


DECODERS: Mapping[str, Decoder] = {"ours": _ours, "decord2": _decord, "PyAV": _pyav}


def clip_rates(paths: Sequence[Path], *, rounds: int) -> dict[str, list[float]]:
    """Clips a second of each decoder, one number a round; the decoders take turns inside a round.

    Args:
        paths: One clip of each is read in a round, at the same start for all decoders.
        rounds: How often.
    """
    generator = np.random.default_rng(0)
    rates: dict[str, list[float]] = {name: [] for name in DECODERS}
    for number in range(rounds):
        starts = generator.integers(0, NUM_FRAMES - CLIP_FRAMES + 1, len(paths)).tolist()
        requests = [Request(path, start) for path, start in zip(paths, starts)]
        names = list(DECODERS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rates[name].append(len(requests) / _run(DECODERS[name], requests))
    return rates


def _run(decoder: Decoder, requests: Sequence[Request]) -> float:
    waiting, lock = iter(requests), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                request = next(waiting, None)
            if request is None:
                return
            decoder(request.path, request.start)

    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for done in [pool.submit(work) for _ in range(NUM_THREADS)]:
            done.result()
    return time.perf_counter() - started


def processor_ms(paths: Sequence[Path]) -> dict[str, list[float]]:
    """Processor time of one clip of each file, all threads together, in ms.

    Other programs on the machine move it far less than the rate.
    """
    starts = np.random.default_rng(2).integers(0, NUM_FRAMES - CLIP_FRAMES + 1, len(paths)).tolist()
    spent: dict[str, list[float]] = {name: [] for name in DECODERS}
    for path, start in zip(paths, starts):
        for name, decoder in DECODERS.items():
            began = time.process_time()
            decoder(path, start)
            spent[name].append(1000 * (time.process_time() - began))
    return spent


def exact_fraction(decoder: Decoder, paths: Sequence[Path]) -> float:
    """Share of clips whose frames carry the numbers asked for."""
    starts = np.random.default_rng(1).integers(0, NUM_FRAMES - CLIP_FRAMES + 1, len(paths)).tolist()
    hits = sum(
        [read_number(frame) for frame in decoder(path, start)] == list(range(start, start + CLIP_FRAMES))
        for path, start in zip(paths, starts)
    )
    return hits / len(paths)


def video_rows(folder: Path, *, is_quick: bool = False) -> list[Row]:
    """Measure everything about video for the table of the ingest benchmark."""
    paths = make_videos(folder, 24 if is_quick else 200)
    rates = clip_rates(paths, rounds=3 if is_quick else 7)
    medians = {name: float(np.median(values)) for name, values in rates.items() if name != "ours"}
    fastest = max(medians, key=lambda name: medians[name])
    ratio = float(np.median(np.array(rates["ours"]) / np.array(rates[fastest])))
    rows = [
        median_row(
            f"16-frame clips at random start, {NUM_THREADS} threads, beside {name}",
            rates["ours"],
            "clips/s",
            peer=name + (" (the fastest bare decoder)" if name == fastest else ""),
            peer_values=rates[name],
            target="at least 0.95 of the fastest bare decoder" if name == fastest else None,
            holds=ratio >= 0.95 if name == fastest else None,
        )
        for name in medians
    ]
    spent = processor_ms(paths)
    rows += [
        median_row(
            f"processor time of such a clip, beside {name}",
            spent["ours"],
            "ms",
            peer=name,
            peer_values=spent[name],
        )
        for name in medians
    ]
    exact = exact_fraction(DECODERS["ours"], paths[:24])
    rows.append(
        median_row(
            "clips with exactly the frames asked for",
            [exact],
            "of 1",
            target="all of them",
            holds=exact == 1.0,
        )
    )
    return rows
