"""Field cases of loading, shuffling and resuming."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datapipe import ImageField, Loader, StageOptions, WithReplacement
from datapipe.transforms import RandomCrop
from storage import FeatureStore, View
from tools.bench.storage_large import large_key, make_large_store


def make_view(path: Path, num_rows: int) -> View:
    """A store of texts; enough wherever only the order matters."""
    store = FeatureStore.create(path)
    store.append({"key": f"{index:04d}", "caption": f"text {index}"} for index in range(num_rows))
    return store.refresh().select()


def keys_of(loader: Loader) -> list[str]:
    return [key for batch in loader for key in batch.keys]


@pytest.mark.slow
def test_load_01_memory_does_not_follow_the_index(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    store.append(
        {"key": f"{index:07d}", "caption": f"a text of usual length {index}"} for index in range(60_000)
    )
    script = textwrap.dedent(
        """
        import sys, psutil
        from datapipe import Loader
        from storage import FeatureStore
        view = FeatureStore.open(sys.argv[1]).select()
        loader = Loader(view, batch_size=64, image=None)
        next(iter(loader))
        process = psutil.Process()
        before = process.memory_full_info().uss
        for _ in range(2):
            for batch in loader:
                pass
        print(process.memory_full_info().uss - before)
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "store")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 20 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True])
def test_load_02_kept_batches_cost_no_descriptors_and_no_shared_memory(tmp_path: Path, shuffle: bool) -> None:
    store = FeatureStore.create(tmp_path / "store")
    codes = np.arange(64, dtype=np.int16)
    store.append({"key": f"{index:05d}", "tensors": {"codes": codes + index}} for index in range(8000))
    script = textwrap.dedent(
        """
        import resource, sys
        from datapipe import Loader
        from storage import FeatureStore
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        view = FeatureStore.open(sys.argv[1]).select()
        options = {"image": None, "tensors": ["codes"], "columns": (), "shuffle": sys.argv[2] == "True"}
        loader = Loader(view, batch_size=4, **options)
        kept = list(loader)
        print(len(kept), sum(int(batch.tensors["codes"][:, 0].sum()) for batch in kept))
        assert "/dev/shm" not in open("/proc/self/maps").read()
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "store"), str(shuffle)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2000", str(sum(range(8000)))]


@pytest.mark.slow
def test_load_01_ranks_that_read_an_epoch_of_a_large_index_stay_small(tmp_path: Path) -> None:
    """Four processes, each a rank of a loader over 1M rows; private memory beyond the imports, one epoch."""
    store = make_large_store(tmp_path / "store", 1_000_000, 250_000)
    script = textwrap.dedent(
        """
        import gc, json, os, sys
        from datapipe import Loader
        from storage import FeatureStore
        from tools.bench.loader_programs import private_bytes
        readers = []
        for rank in range(4):
            read, write = os.pipe()
            if os.fork() == 0:
                gc.collect()  # dirties the pages of the imports, which are shared until then
                before = private_bytes()
                view = FeatureStore.open(sys.argv[1]).select()
                options = {"image": None, "columns": (), "rank": rank, "world_size": 4}
                rows = sum(len(batch) for batch in Loader(view, batch_size=2048, drop_last=False, **options))
                os.write(write, json.dumps([rows, private_bytes() - before]).encode())
                os._exit(0)
            os.close(write)
            readers.append(read)
        print(json.dumps([json.loads(os.read(read, 100)) for read in readers]))
        """
    )
    command = [sys.executable, "-c", script, str(store.path)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    found = json.loads(result.stdout)
    assert sum(rows for rows, _ in found) == 1_000_000
    assert max(grown for _, grown in found) < 60 << 20


@pytest.mark.slow
def test_load_02_batches_larger_than_shared_memory(tmp_path: Path) -> None:
    """100 MB a batch from processes, whose results never pass through /dev/shm."""
    buffer = io.BytesIO()
    Image.new("RGB", (512, 512), (10, 200, 30)).save(buffer, "PNG")
    store = FeatureStore.create(tmp_path / "store")
    store.append({"key": f"{index:02d}", "blob": buffer.getvalue()} for index in range(32))
    script = textwrap.dedent(
        """
        import sys
        import psutil
        from datapipe import ImageField, Loader, StageOptions
        from storage import FeatureStore
        if __name__ == "__main__":
            loader = Loader(
                FeatureStore.open(sys.argv[1]).select(),
                batch_size=32,
                image=ImageField(size=(512, 512)),
                columns=(),
                stages={"decode": StageOptions(executor="process", concurrency=2)},
            )
            for batch in loader:
                tree = [psutil.Process(), *psutil.Process().children()]
                maps = [each.path for process in tree for each in process.memory_maps()]
                print(batch.images.nbytes, len(tree), [path for path in maps if "/dev/shm" in path])
        """
    )
    program = tmp_path / "program.py"
    program.write_text(script)
    command = [sys.executable, str(program), str(tmp_path / "store")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    size, processes, shared = result.stdout.split()
    assert (size, shared) == (str(32 * 3 * 512 * 512 * 4), "[]") and int(processes) > 2


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_load_05_the_stream_does_not_depend_on_threads(tmp_path: Path, threads: int) -> None:
    view = make_view(tmp_path / "store", 50)
    wanted = Loader(view, batch_size=8, image=None, seed=3, num_threads=1, prefetch_batches=1)
    found = Loader(view, batch_size=8, image=None, seed=3, num_threads=threads, prefetch_batches=threads * 2)
    epochs = [keys_of(wanted) for _ in range(3)]
    assert [keys_of(found) for _ in range(3)] == epochs
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_threads": 1}, id="one thread"),
        pytest.param({"num_threads": 4}, id="four threads"),
        pytest.param(
            {"stages": {"transform": StageOptions(executor="process", concurrency=2)}}, id="processes"
        ),
        pytest.param({"batch_size": 4}, id="another batch size"),
    ],
)
def test_load_05_crops_follow_the_sample_and_the_epoch(tmp_path: Path, options: dict[str, object]) -> None:
    """A pixel of the pictures tells its place, so that a crop of one pixel tells the offset."""
    places = np.arange(64 * 64).reshape(64, 64)
    pixels = np.stack([places // 64, places % 64, np.zeros_like(places)], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    store = FeatureStore.create(tmp_path / "store")
    store.append({"key": f"{index:02d}", "blob": buffer.getvalue()} for index in range(8))
    view = store.refresh().select()
    image = ImageField(size=(64, 64), transforms=(RandomCrop((1, 1)),), pixels="uint8")

    def crops(**settings: object) -> list[dict[str, tuple[int, ...]]]:
        loader = Loader(view, image=image, columns=(), **{"batch_size": 8, **settings})  # type: ignore[arg-type]
        return [
            {
                key: tuple(picture.flatten().tolist())
                for batch in loader
                for key, picture in zip(batch.keys, batch.images)
            }
            for _ in range(2)
        ]

    epochs = crops(**options)
    assert epochs == crops(num_threads=2)
    drawn = [offset for epoch in epochs for offset in epoch.values()]
    assert len(drawn) == 16 and len(set(drawn)) >= 15


def test_load_06_resume_in_a_new_process_is_exactly_the_rest(tmp_path: Path) -> None:
    epoch = 2
    view = make_view(tmp_path / "store", 64)
    loader = Loader(view, batch_size=4, image=None, seed=11)
    loader.set_epoch(epoch)
    whole = keys_of(loader)
    loader.set_epoch(epoch)
    torch.rand(3), np.random.rand(3)
    batches = iter(loader)
    before = [key for _ in range(5) for key in next(batches).keys]
    state = json.dumps(loader.state_dict())
    script = textwrap.dedent(
        """
        import json, sys
        from datapipe import Loader
        from storage import FeatureStore
        loader = Loader(FeatureStore.open(sys.argv[1]).select(), batch_size=4, image=None, seed=11)
        loader.load_state_dict(json.loads(sys.argv[2]))
        print(json.dumps([[key for batch in loader for key in batch.keys], loader.epoch]))
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "store"), state]
    after, next_epoch = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert before + after == whole
    assert sorted(before + after) == sorted(view.keys())
    assert next_epoch == epoch + 1


def test_load_08_state_follows_what_was_handed_out(tmp_path: Path) -> None:
    view = make_view(tmp_path / "store", 60)
    loader = Loader(view, batch_size=5, image=None, prefetch_batches=8, num_threads=3)
    whole = keys_of(loader)
    loader.set_epoch(0)
    batches, seen = iter(loader), []
    for _ in range(3):
        seen += next(batches).keys
    resumed = Loader(view, batch_size=5, image=None, prefetch_batches=8)
    resumed.load_state_dict(loader.state_dict())
    assert seen + keys_of(resumed) == whole


def test_load_09_any_rank_count_goes_on_with_the_exact_rest(tmp_path: Path) -> None:
    view = make_view(tmp_path / "store", 97)

    def loaders(world_size: int, threads: int) -> list[Loader]:
        return [
            Loader(
                *(view,),
                batch_size=8,
                image=None,
                drop_last=False,
                rank=rank,
                world_size=world_size,
                num_threads=threads,
            )
            for rank in range(world_size)
        ]

    whole = keys_of(loaders(1, 1)[0])
    ranks = loaders(4, 4)
    running = [iter(loader) for loader in ranks]
    seen = [key for _ in range(5) for batches in running for key in next(batches).keys]
    states = [loader.state_dict() for loader in ranks]
    assert all(state == states[0] for state in states)
    for world_size in (1, 2, 3):
        rest: list[list[str]] = []
        for loader in loaders(world_size, 2):
            loader.load_state_dict(states[0])
            rest.append([batch.keys for batch in loader])
        assert seen + [key for batches in zip(*rest) for keys in batches for key in keys] == whole
    other = Loader(make_view(tmp_path / "other", 96), batch_size=8, image=None)
    with pytest.raises(ValueError, match="saved with num_rows 97, this loader has 96"):
        other.load_state_dict(states[0])


def test_load_10_flags_and_epochs_survive_a_resume(tmp_path: Path) -> None:
    view = make_view(tmp_path / "store", 50)
    ranks = [Loader(view, batch_size=8, image=None, rank=rank, world_size=2) for rank in range(2)]
    for loader in ranks:
        loader.set_epoch(2)
    first = next(iter(ranks[0]))
    assert len(first) == 4
    batches = ranks[0].forever()
    for _ in range(5):
        next(batches)
    for loader in ranks:
        loader.load_state_dict(ranks[0].state_dict())
    rest = [[batch.keys for batch in loader] for loader in ranks]
    assert [len(batches) for batches in rest] == [1, 1]
    third = [keys_of(loader) for loader in ranks]
    assert all(len(keys) == 24 for keys in third)
    assert not set(third[0]) & set(third[1])
    again = Loader(view, batch_size=8, image=None, rank=0, world_size=2)
    again.set_epoch(3)
    assert keys_of(again) == third[0]
    again.set_epoch(2)
    assert keys_of(again) != third[0]


@pytest.mark.parametrize("num_rows", [97, 99, 100, 104])
def test_load_12_evaluation_sees_each_row_once(tmp_path: Path, num_rows: int) -> None:
    view = make_view(tmp_path / "store", num_rows)
    ranks = [
        Loader(view, batch_size=8, image=None, shuffle=False, drop_last=False, rank=rank, world_size=2)
        for rank in range(2)
    ]
    shares = [[batch.keys for batch in loader] for loader in ranks]
    assert len(shares[0]) == len(shares[1]) == len(ranks[0])
    counted = Counter(key for share in shares for keys in share for key in keys)
    assert set(counted) == set(view.keys()) and set(counted.values()) == {1}


def test_load_13_sessions_without_a_main_file_load_with_threads(tmp_path: Path) -> None:
    make_view(tmp_path / "store", 20)
    script = textwrap.dedent(
        f"""
        import multiprocessing
        multiprocessing.set_start_method("spawn")
        from datapipe import Loader
        from storage import FeatureStore
        view = FeatureStore.open({str(tmp_path / "store")!r}).select()
        loader = Loader(view, batch_size=5, image=None, num_threads=2)
        print(sum(len(batch) for batch in loader))
        """
    )
    result = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "20"


def test_load_13_a_function_of_a_session_is_named_when_processes_are_asked_for(tmp_path: Path) -> None:
    make_view(tmp_path / "store", 20)
    script = textwrap.dedent(
        f"""
        from datapipe import ImageField, Loader, StageOptions
        from storage import FeatureStore
        view = FeatureStore.open({str(tmp_path / "store")!r}).select()
        def brighten(image, generator):
            return image
        image = ImageField(size=(4, 4), transforms=(brighten,))
        try:
            Loader(view, batch_size=5, image=image, stages={{"transform": StageOptions(executor="process")}})
        except ValueError as error:
            print(error)
        """
    )
    result = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=True)
    assert "'transform'" in result.stdout and "brighten" in result.stdout
    assert "it is defined in this session only" in result.stdout


@pytest.mark.parametrize(("shards", "rows", "world_size"), [(1, 6, 2), (2, 8, 4), (1, 3, 4)])
def test_tar_11_fewer_shards_than_readers(tmp_path: Path, shards: int, rows: int, world_size: int) -> None:
    """Batches are shared row by row, whatever shard a row is in; tests/integration has it over gloo."""
    store = FeatureStore.create(tmp_path / "store")
    for shard in range(shards):
        store.append({"key": f"{row:02d}", "caption": "x"} for row in range(shard, rows, shards))
    view = store.refresh().select()
    ranks = [
        Loader(
            view, batch_size=4, image=None, drop_last=False, rank=rank, world_size=world_size, num_threads=2
        )
        for rank in range(world_size)
    ]
    seen = [[batch.keys for batch in loader] for loader in ranks]
    assert len({len(steps) for steps in seen}) == 1
    assert sorted(key for steps in seen for keys in steps for key in keys) == sorted(view.keys())


@pytest.mark.parametrize(("threads", "world_size"), [(1, 1), (4, 1), (1, 2), (4, 4)])
def test_tar_12_the_length_of_an_epoch_does_not_follow_the_workers(
    tmp_path: Path, threads: int, world_size: int
) -> None:
    view = make_view(tmp_path / "store", 50)

    def ranks(**options: object) -> list[Loader]:
        return [
            Loader(
                *(view,),
                batch_size=8,
                image=None,
                drop_last=False,
                rank=rank,
                world_size=world_size,
                num_threads=threads,
                **options,  # type: ignore[arg-type]
            )
            for rank in range(world_size)
        ]

    counted = Counter(key for loader in ranks() for key in keys_of(loader))
    assert set(counted) == set(view.keys()) and set(counted.values()) == {1}
    drawn = Counter(key for loader in ranks(order=WithReplacement(length=50)) for key in keys_of(loader))
    assert drawn.total() == 50 and max(drawn.values()) > 1


def test_load_08_a_bad_picture_is_named_and_leaves_no_thread(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    store = FeatureStore.create(tmp_path / "store")
    blobs = {"good": buffer.getvalue(), "broken": buffer.getvalue()[:40]}
    store.append({"key": key, "blob": blob, "caption": "x"} for key, blob in blobs.items())
    loader = Loader(store.refresh().select(), batch_size=2)
    with pytest.raises(ValueError, match=r"sample 'broken' \(row 1\): truncated"):
        next(iter(loader))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("datapipe")]


@pytest.mark.parametrize(
    ("num_rows", "part_rows", "most_bytes"),
    [
        pytest.param(1_000_000, 250_000, 20 << 20, id="a merged index"),
        pytest.param(10_000_000, 1_000_000, 200 << 20, id="mapped indexes", marks=pytest.mark.slow),
    ],
)
def test_load_01_a_large_index_is_shared_by_forked_workers(
    tmp_path: Path, num_rows: int, part_rows: int, most_bytes: int
) -> None:
    """Workers read keys of random rows and find keys; pages of the mapped tables are the system's."""
    store = make_large_store(tmp_path / "store", num_rows, part_rows)
    assert len(store) == num_rows
    assert store.row(large_key(num_rows - 1)) == num_rows - 1
    command = [sys.executable, "-m", "tools.bench.storage_libraries.large_index", str(store.path)]
    root = Path(__file__).parents[2]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout)
    assert found["bytes"] < most_bytes
    assert len(found["worker_bytes"]) == 4 and max(found["worker_bytes"]) < 50 << 20
