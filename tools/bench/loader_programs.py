"""Measurements that want a process of their own. Each prints one JSON object.

python -m tools.bench.loader_programs imports|resume|overlap|memory|decode_beside STORE
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

_MODEL_S = 0.020
_DATA_S = 0.015
_EPOCHS = 5
Found = dict[str, float | list[float]]


def main() -> None:
    """Run one measurement."""
    print(json.dumps(_PROGRAMS[sys.argv[1]](*sys.argv[2:])))


def imports() -> Found:
    """Seconds of importing the pipeline when torch is loaded."""
    importlib.import_module("torch")
    started = time.perf_counter()
    datapipe = importlib.import_module("datapipe")
    imported = time.perf_counter()
    _ = datapipe.Loader
    return {"seconds": imported - started, "with_loader_seconds": time.perf_counter() - started}


def resume(store: str) -> Found:
    """Seconds from making a loader to its first batch, at the start of an epoch and in its middle."""
    from storage import FeatureStore

    view = FeatureStore.open(store).select()
    middle = {**_text_loader(view).state_dict(), "consumed": len(view) // 2 // 64 * 64}
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(9):
        for is_resumed in (turn % 2 == 0, turn % 2 == 1):
            started = time.perf_counter()
            loader = _text_loader(view)
            if is_resumed:
                loader.load_state_dict(middle)
            batches = iter(loader)
            next(batches)
            times[is_resumed].append(time.perf_counter() - started)
            batches.close()
    return {"start_seconds": median(times[False][1:]), "resume_seconds": median(times[True][1:])}


def overlap(store: str, steps: str) -> Found:
    """Seconds of a loop around a model alone, and of one that takes its data from a loader with one thread.

    The model waits as for a GPU, or computes on the other core. A batch is made so large that its data take
    three quarters of a step. `computing_beside`: the model alone while another process, with which it shares
    the machine and nothing else, makes the same data at the same rate.
    """
    import torch

    from storage import FeatureStore

    torch.set_num_threads(1)
    view = FeatureStore.open(store).select()
    batch_size = max(1, round(_DATA_S * _rate(view)))
    weights = torch.randn(512, 512)
    rounds = max(1, round(_MODEL_S / _seconds(lambda: weights @ weights, 200)))

    def compute() -> None:
        for _ in range(rounds):
            torch.mm(weights, weights)

    found: Found = {"batch_size": batch_size, "data_seconds": batch_size / _rate(view)}
    for name, model in (("waiting", lambda: time.sleep(_MODEL_S)), ("computing", compute)):
        batches = _picture_loader(view, batch_size).forever()
        next(batches)
        found[f"{name}_alone"] = _loop(range(int(steps)), model)
        found[f"{name}_with_data"] = _loop((next(batches) for _ in range(int(steps))), model)
        batches.close()
    with _decoding_beside(store, batch_size):
        found["computing_beside"] = _loop(range(int(steps)), compute)
    return found


@contextmanager
def _decoding_beside(store: str, batch_size: int) -> Iterator[None]:
    command = [sys.executable, "-m", "tools.bench.loader_programs", "decode_beside", store, str(batch_size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            yield
        finally:
            other.kill()


def decode_beside(store: str, batch_size: str) -> Found:
    """A batch a step until killed; says when the first one is there."""
    from storage import FeatureStore

    for number, _ in enumerate(_picture_loader(FeatureStore.open(store).select(), int(batch_size)).forever()):
        if number == 0:
            print(flush=True)
            started = time.perf_counter()
        time.sleep(max(0.0, started + (number + 1) * _MODEL_S - time.perf_counter()))
    return {}


def memory(store: str, *columns: str) -> Found:
    """Private bytes of a process over those after its imports: with the first batch, and after each epoch.

    The batches hold keys, rows and these columns.
    """
    import torch  # noqa: F401

    from datapipe import Loader
    from storage import FeatureStore

    before = private_bytes()
    view = FeatureStore.open(store).select()
    loader = Loader(view, batch_size=1024, image=None, columns=columns, drop_last=False)
    next(iter(loader))
    first = private_bytes() - before
    after = []
    for _ in range(_EPOCHS):
        for _batch in loader:
            pass
        after.append(float(private_bytes() - before))
    return {"first": first, "epochs": after}


def _text_loader(view: Any) -> Any:
    from datapipe import Loader

    return Loader(view, batch_size=64, image=None, columns=("width",))


def _picture_loader(view: Any, batch_size: int) -> Any:
    from datapipe import Loader
    from tools.bench.loader_libraries.ours import IMAGE

    return Loader(view, batch_size=batch_size, image=IMAGE, num_threads=1)


def _rate(view: Any) -> float:
    """Pictures a second that one thread decodes."""
    batches = iter(_picture_loader(view, 16))
    next(batches)
    started = time.perf_counter()
    count = sum(len(batch) for batch, _ in zip(batches, range(16)))
    return count / (time.perf_counter() - started)


def _seconds(function: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - started) / times


def _loop(data: Iterable[object], model: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in data:
        model()
    return time.perf_counter() - started


def private_bytes() -> int:
    """Memory of this process alone. Pages of mapped files are not counted: the system can drop them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


_PROGRAMS: dict[str, Callable[..., Found]] = {
    "imports": imports,
    "resume": resume,
    "overlap": overlap,
    "decode_beside": decode_beside,
    "memory": memory,
}

if __name__ == "__main__":
    main()
