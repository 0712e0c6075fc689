"""Ingest beside bare decoders, Pillow and the MDS writer, on the same files.

python -m tools.bench.ingest [--quick] [--rounds 5] [--only SECTION ...] [--data FOLDER]

Writes benchmarks/ingest.json and .md, unless only a part was measured. Files are in the page cache. What is
compared takes turns: a round is one measurement of each, and ratios are taken within a round. Two threads
each.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from datapipe import ingest
from datapipe.decode import decode_image
from tools.bench.ingest_data import make_pictures, make_prompts, make_tiny_tar, without_sidecars
from tools.bench.ingest_video import video_rows
from tools.bench.peers import peer_python
from tools.bench.results import ROOT, Row, median_row, write_results

_THREADS = 2
_SIDE = 224
_BATCH = 64
_PACKAGES = ("unirl", "numpy", "pillow", "simplejpeg", "torch", "xxhash", "lmdb", "av", "decord2")
_MEMORY_LIMIT_MIB = 400
_FLAT_MEMORY = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    pictures: int
    prompts: int
    tiny: int
    rounds: int


FULL = Sizes(pictures=4000, prompts=1_000_000, tiny=100_000, rounds=5)
QUICK = Sizes(pictures=400, prompts=50_000, tiny=4_000, rounds=2)


def main() -> None:
    """Measure the sections and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute, with small files")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="+", choices=sorted(SECTIONS), default=sorted(SECTIONS))
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "bench")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    rounds = options.rounds or sizes.rounds
    rows = [row for name in options.only for row in SECTIONS[name](options.data, sizes, rounds)]
    if options.quick or set(options.only) != set(SECTIONS):
        print("\n".join(map(str, rows)))
    else:
        print(write_results("ingest", rows, packages=_PACKAGES).with_suffix(".md").read_text())


def decode_rows(data: Path, sizes: Sizes, rounds: int) -> list[Row]:
    """Ingest with a full check beside the bare loop of the fastest decoder that reads the same pictures.

    The bare loop reads no captions: these are given in the ways that people give them, each a row.
    """
    photos = _photos(data, sizes)
    alone, tabled = without_sidecars(photos)
    folders = {
        "ingest with full decode": alone,
        "ingest with full decode, captions in one CSV table": tabled,
        "ingest with full decode, a caption file beside each picture": photos,
    }
    files = sorted(photos.glob("*.jpg"))
    decoders: dict[str, Callable[[bytes], object]] = {
        "simplejpeg": lambda data: simplejpeg.decode_jpeg(data, "RGB"),
        "simplejpeg, fast transforms": lambda data: simplejpeg.decode_jpeg(
            data, "RGB", fastdct=True, fastupsample=True
        ),
        "Pillow": lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")),
    }
    for folder in folders.values():  # imports and caches
        _ingest_rate(folder, data, len(files))
    mine: dict[str, list[float]] = {name: [] for name in folders}
    bare: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, folder in folders.items():
            mine[name].append(_ingest_rate(folder, data, len(files)))
        for name, decode in decoders.items():
            bare[name].append(_read_rate(decode, files))
    fastest = max(bare, key=lambda name: float(np.median(bare[name])))
    peer = bare[fastest]
    return [
        *(
            median_row(
                name,
                rates,
                "images/s",
                peer=f"bare decode loop, {fastest}",
                peer_values=peer,
                target="at least 0.85 of it",
                holds=float(np.median([a / b for a, b in zip(rates, peer)])) >= 0.85,
            )
            for name, rates in mine.items()
        ),
        *(median_row(f"bare decode loop, {name}", rates, "images/s") for name, rates in bare.items()),
    ]


def trust_rows(data: Path, sizes: Sizes, rounds: int) -> list[Row]:
    """Ingest of headers alone beside the writer of MosaicML's MDS."""
    photos = _photos(data, sizes)
    num = sum(1 for _ in photos.glob("*.jpg"))
    python = peer_python(data / "storage")
    mine, peer = [], []
    _ingest_rate(photos, data, num, trust=True)  # imports and caches
    for _ in range(rounds):
        mine.append(_ingest_rate(photos, data, num, trust=True))
        peer.append(num / _mds_seconds(python, photos, data / "mds"))
    share = float(np.median([a / b for a, b in zip(mine, peer)]))
    return [
        median_row(
            "ingest with --trust",
            mine,
            "images/s",
            peer="MDS writer",
            peer_values=peer,
            target="at least 0.8 of it",
            holds=share >= 0.8,
        )
    ]


def batch_rows(data: Path, sizes: Sizes, rounds: int) -> list[Row]:
    """Decode and resize into batches, with the same antialiased filter. Each thread does half of a batch."""
    blobs = [file.read_bytes() for file in sorted(_photos(data, sizes).glob("*.jpg"))]

    def by_pillow(blob: bytes, out: np.ndarray) -> None:
        image = Image.open(io.BytesIO(blob)).convert("RGB")
        out[...] = image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)

    def by_us(blob: bytes, out: np.ndarray) -> None:
        pixels = decode_image(blob, size=(_SIDE, _SIDE), out=out)
        if pixels is not out:
            out[...] = pixels

    by_us(blobs[0], np.empty((_SIDE, _SIDE, 3), np.uint8))  # imports torch
    mine, peer = [], []
    for _ in range(rounds):
        mine.append(_batch_rate(by_us, blobs))
        peer.append(_batch_rate(by_pillow, blobs))
    ratio = float(np.median([a / b for a, b in zip(mine, peer)]))
    return [
        median_row(
            f"decode and resize to {_SIDE}, antialiased",
            mine,
            "images/s",
            peer="Pillow",
            peer_values=peer,
            target="at least 2.2 times it",
            holds=ratio >= 2.2,
        )
    ]


def prompt_rows(data: Path, sizes: Sizes, rounds: int) -> list[Row]:
    """A Parquet table of prompts into a store."""
    table = make_prompts(data / f"prompts-{sizes.prompts}.parquet", sizes.prompts)
    seconds = []
    for _ in range(min(rounds, 3)):
        store = _fresh(data / "prompt-store")
        started = time.perf_counter()
        report = ingest(table, store, column_map={"caption": "prompt"}, optional=["image"], progress=False)
        seconds.append(time.perf_counter() - started)
        _check(report.num_added, sizes.prompts)
    limit = 60 * sizes.prompts / 1_000_000
    return [
        median_row(
            f"ingest of {sizes.prompts} prompts from Parquet",
            seconds,
            "s",
            target=f"under {limit:g}",
            holds=float(np.median(seconds)) < limit,
        )
    ]


def memory_rows(data: Path, sizes: Sizes, rounds: int) -> list[Row]:
    """Peak memory of an ingest, in a process of its own, for a few pictures and for many."""
    few, many = sizes.tiny // 10, sizes.tiny
    peaks = [
        _peak_mib(make_tiny_tar(data / f"tiny-{num}.tar", num), _fresh(data / "tiny-store"))
        for num in (few, many)
    ]
    return [
        median_row(
            f"peak memory, {many} pictures",
            [peaks[1]],
            "MiB",
            peer=f"{few} pictures",
            peer_values=[peaks[0]],
            target=f"at most {_FLAT_MEMORY} times it, and under {_MEMORY_LIMIT_MIB}",
            holds=peaks[1] <= _FLAT_MEMORY * peaks[0] and peaks[1] < _MEMORY_LIMIT_MIB,
        )
    ]


def clip_rows(data: Path, sizes: Sizes, rounds: int) -> list[Row]:
    """Clips of short videos beside bare decoders."""
    return video_rows(data / "videos", is_quick=sizes is QUICK)


SECTIONS: dict[str, Callable[[Path, Sizes, int], list[Row]]] = {
    "batch": batch_rows,
    "decode": decode_rows,
    "memory": memory_rows,
    "prompts": prompt_rows,
    "trust": trust_rows,
    "video": clip_rows,
}


def _photos(data: Path, sizes: Sizes) -> Path:
    return make_pictures(data / f"pictures-{sizes.pictures}", sizes.pictures)


def _ingest_rate(photos: Path, data: Path, num: int, *, trust: bool = False) -> float:
    store = _fresh(data / "ingest-store")
    started = time.perf_counter()
    report = ingest(photos, store, optional=["caption"], workers=_THREADS, trust=trust, progress=False)
    seconds = time.perf_counter() - started
    _check(report.num_added, num)
    return num / seconds


def _read_rate(decode: Callable[[bytes], object], files: Sequence[Path]) -> float:
    with ThreadPoolExecutor(_THREADS) as pool:
        started = time.perf_counter()
        for _ in pool.map(lambda file: decode(file.read_bytes()), files):
            pass
        return len(files) / (time.perf_counter() - started)


def _batch_rate(decode: Callable[[bytes, np.ndarray], None], blobs: Sequence[bytes]) -> float:
    batch = np.empty((_BATCH, _SIDE, _SIDE, 3), np.uint8)

    def decode_share(pairs: list[tuple[bytes, np.ndarray]]) -> None:
        for blob, out in pairs:
            decode(blob, out)

    with ThreadPoolExecutor(_THREADS) as pool:
        started = time.perf_counter()
        for start in range(0, len(blobs), _BATCH):
            pairs = list(zip(blobs[start : start + _BATCH], batch))
            list(pool.map(decode_share, [pairs[thread::_THREADS] for thread in range(_THREADS)]))
        return len(blobs) / (time.perf_counter() - started)


def _mds_seconds(python: Path, photos: Path, target: Path) -> float:
    command = [str(python), "-m", "tools.bench.ingest_mds", str(photos), str(_fresh(target))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


# The peak of getrusage is handed down from the process that started this one; VmHWM is not.
_PEAK = """
import json, re, sys
from pathlib import Path
from datapipe import ingest
report = ingest(sys.argv[1], sys.argv[2], progress=False)
status = Path("/proc/self/status").read_text()
print(json.dumps([report.num_added, int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 1024]))
"""


def _peak_mib(tar: Path, store: Path) -> float:
    command = [sys.executable, "-c", _PEAK, str(tar), str(store)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[1])


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _check(found: int, wanted: int) -> None:
    if found != wanted:
        raise SystemExit(f"{found} rows came in, {wanted} were meant to")


if __name__ == "__main__":
    main()
