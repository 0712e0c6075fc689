"""The stages of a loader: bad samples, budgets, processes, texts, fields, and an end to everything."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from datapipe import ImageField, Loader, LoaderError, SampleError, StageError, StageOptions, TextField
from datapipe.fields import RawSample
from datapipe.transforms import sample_generator
from storage import FeatureStore, View
from tests.datapipe.stage_functions import NumberField, brighter, letters
from tests.datapipe.test_loader import picture, png

ROOT = Path(__file__).parents[2]
BAD = (3, 17, 18)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """24 rows, of which three hold no picture and no codes."""
    store = FeatureStore.create(tmp_path_factory.mktemp("stages") / "store")
    store.append(
        {
            "key": f"{index:03d}",
            "blob": b"\0no picture" if index in BAD else png(picture(index)),
            "caption": "abcdefghijklmnopqrstuvwxyz"[: index % 5] or None,
            "number": index,
            "tensors": {"codes": None if index in BAD else np.full(3, index, np.int16)},
        }
        for index in range(24)
    )
    return store.refresh().select()


def make(view: View, **options: Any) -> Loader:
    usual = {"batch_size": 6, "image": ImageField(size=(4, 6)), "columns": ["number"]}
    return Loader(view, **{**usual, **options})


def allow(number: int, *stages: str) -> dict[str, StageOptions]:
    return {stage: StageOptions(max_failures=number) for stage in stages}


def test_bad_samples_are_left_out_and_the_order_of_the_others_stays(view: View) -> None:
    plain = [batch.keys for batch in make(view, image=None)]
    loader = make(view, tensors=["codes"], stages=allow(3, "decode", "fetch"))
    batches = list(loader)
    bad = {f"{index:03d}" for index in BAD}
    assert [batch.keys for batch in batches] == [[key for key in keys if key not in bad] for keys in plain]
    for batch in batches:
        assert batch.images is not None and len(batch) == len(batch.images) == len(batch.tensors["codes"])
        for place, key in enumerate(batch.keys):
            assert view.store.key(int(batch.rows[place])) == key
            assert batch.columns["number"][place] == int(key) == int(batch.tensors["codes"][place, 0])
            wanted = torch.from_numpy(picture(int(key))).permute(2, 0, 1).float() / 127.5 - 1
            torch.testing.assert_close(batch.images[place], wanted, atol=1e-6, rtol=0)
    stats = loader.stats()
    assert (stats.bad, stats.samples, stats.bad_fraction) == ({"TensorColumnError": 3}, 21, 3 / 24)


def test_ranks_and_resumes_leave_out_the_same_samples(view: View) -> None:
    options: dict[str, Any] = {"stages": allow(3, "decode"), "seed": 2}
    whole = [key for batch in make(view, **options) for key in batch.keys]
    first = [make(view, rank=rank, world_size=2, **options) for rank in range(2)]
    running = [iter(loader) for loader in first]
    seen = [key for _ in range(2) for shares in running for key in next(shares).keys]
    state = json.loads(json.dumps(first[0].state_dict()))
    assert state == first[1].state_dict() and state["consumed"] == 12
    rest = [make(view, rank=rank, world_size=3, num_threads=1, **options) for rank in range(3)]
    for loader in rest:
        loader.load_state_dict(state)
    seen += [key for shares in zip(*rest, strict=True) for share in shares for key in share.keys]
    assert seen == whole and len(whole) == 21


def test_over_budget_one_error_names_all(view: View) -> None:
    loader = make(view, shuffle=False, stages=allow(2, "decode"), num_threads=3)
    batches = iter(loader)
    assert [len(next(batches)) for _ in range(3)] == [5, 6, 5]
    with pytest.raises(SampleError, match="3 bad samples, 2 may be left out") as caught:
        next(batches)
    assert "by reason: not_an_image 3;" in str(caught.value)
    assert all(f"sample '{index:03d}' (row {index})" in str(caught.value) for index in BAD)
    with pytest.raises(SampleError, match=r"^sample '003' \(row 3\): not_an_image"):
        list(make(view, shuffle=False))


def test_an_error_of_a_users_function_comes_as_it_is(view: View) -> None:
    def fails(text: str) -> list[int]:
        raise KeyError("no such word")

    texts = {"caption": TextField(tokenizer=fails)}
    with pytest.raises(KeyError, match="no such word") as caught:
        list(make(view, image=None, texts=texts, shuffle=False))
    assert caught.value.__notes__ == ["stage 'tokenize', sample '001' (row 1)"]
    loader = make(view, image=None, texts=texts, stages=allow(24, "tokenize"))
    assert [len(batch) for batch in loader] and loader.stats().bad == {"KeyError": 19}


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_texts_become_padded_ids(view: View, executor: Any) -> None:
    texts = {"caption": TextField(tokenizer=letters, pad_id=-1, max_tokens=3, multiple_of=2)}
    stages = {"tokenize": StageOptions(executor=executor, concurrency=1)}
    loader = make(view, batch_size=5, image=None, texts=texts, shuffle=False, stages=stages)
    batch = next(iter(loader))
    tokens = batch.tokens["caption"]
    assert tokens.ids.tolist() == [[-1] * 4, [1, -1, -1, -1], [1, 2, -1, -1], [1, 2, 3, -1], [1, 2, 3, -1]]
    assert (tokens.ids.dtype, tokens.lengths.tolist()) == (torch.int64, [0, 1, 2, 3, 3])
    assert torch.equal(tokens.mask, tokens.ids != -1)
    loader.close()
    stats = loader.stats()
    assert (stats.tokens, stats.padding, stats.padding_fraction) == (9, 11, 11 / 20)


def test_what_is_no_list_of_ids_is_told(view: View) -> None:
    texts = {"caption": TextField(tokenizer=lambda text: [[1.0]])}  # type: ignore[list-item]
    with pytest.raises(SampleError, match=r"'caption' gave float64\(1, 1\), wanted whole numbers"):
        list(make(view, image=None, texts=texts))
    with pytest.raises(LoaderError, match="max_tokens is 0"):
        TextField(tokenizer=letters, max_tokens=0)


class SeedField:
    needs_blob = True
    columns = ("number",)
    tensors = ("codes", "depths")

    def read(self, raw: RawSample) -> np.ndarray:
        codes = raw.tensors["codes"]
        assert raw.tensors["depths"] is None and raw.blob is not None
        draw = np.random.default_rng(raw.seed).integers(1 << 30)
        return np.array([raw.columns["number"], len(raw.blob), -1 if codes is None else codes[0], draw])


def test_fields_see_the_row_and_fill_a_tensor(view: View) -> None:
    def rows_of(**options: Any) -> dict[str, list[int]]:
        loader = make(view, image=None, fields={"facts": SeedField()}, columns=(), **options)
        return {key: row.tolist() for batch in loader for key, row in zip(batch.keys, batch.tensors["facts"])}

    found = rows_of()
    assert len(found) == 24 and len({row[3] for row in found.values()}) == 24
    for key, (number, num_bytes, code, _) in found.items():
        index = int(key)
        assert (number, code) == (index, -1 if index in BAD else index)
        assert num_bytes == len(view.store.blob(index))
    assert rows_of(num_threads=5, batch_size=4) == found
    assert rows_of(seed=1)["000"][3] != found["000"][3]


def test_pictures_stay_bytes_when_asked_for(view: View) -> None:
    image = ImageField(size=(4, 6), pixels="uint8")
    batch = next(iter(make(view[:2], batch_size=2, image=image, shuffle=False)))
    assert batch.images is not None and batch.images.is_contiguous(memory_format=torch.channels_last)
    assert (batch.images.shape, batch.images.dtype) == ((2, 3, 4, 6), torch.uint8)
    assert torch.equal(batch.images[1].permute(1, 2, 0), torch.from_numpy(picture(1)))


@pytest.mark.slow
def test_decoding_and_transforms_in_processes_give_the_same(view: View) -> None:
    def pixels_of(executor: Any) -> list[Any]:
        options = StageOptions(executor=executor, concurrency=1, max_failures=3)
        image = ImageField(size=(4, 6), transforms=(brighter,))
        loader = make(view, image=image, stages={"decode": options, "transform": options})
        found = [(batch.keys, batch.images) for batch in loader]
        assert loader.stats().bad == {"not_an_image": 3}
        return found

    found, wanted = pixels_of("process"), pixels_of("thread")
    assert [keys for keys, _ in found] == [keys for keys, _ in wanted]
    assert all(torch.equal(images, others) for (_, images), (_, others) in zip(found, wanted))


def test_transforms_draw_by_the_key(view: View) -> None:
    image = ImageField(size=(4, 6), transforms=(brighter,))
    batch = next(iter(make(view[:1], batch_size=1, image=image)))
    pixels = torch.from_numpy(picture(0)).permute(2, 0, 1)
    assert batch.images is not None
    assert torch.equal(batch.images[0], brighter(pixels, sample_generator(seed=0, epoch=0, key="000")))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> View:
    store = FeatureStore.create(tmp_path_factory.mktemp("numbers") / "store")
    store.append({"key": f"n{index}", "number": index} for index in range(60))
    return store.refresh().select()


@pytest.mark.slow
def test_workers_that_die_stop_hang_or_exit_cost_one_sample_each(numbers: View) -> None:
    options = StageOptions(executor="process", concurrency=2, max_failures=5, timeout_s=8)
    loader = Loader(
        numbers,
        batch_size=20,
        image=None,
        columns=(),
        shuffle=False,
        fields={"number": NumberField()},
        stages={"decode": options},
    )
    found = [int(number) for batch in loader for number in batch.tensors["number"][:, 0]]
    assert found == [number for number in range(60) if number not in (13, 23, 33, 43, 53)]
    assert loader.stats().bad == {"DataError": 1, "died": 2, "timed_out": 2}
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "message"),
    [
        (23, r"sample 'n23'.*process \d+ was killed by SIGKILL"),
        (33, r"sample 'n33'.*was ended, it took longer than timeout_s=6"),
        (43, r"sample 'n43'.*exited with code 4"),
    ],
)
def test_without_a_budget_the_sample_is_named(numbers: View, first: int, message: str) -> None:
    loader = Loader(
        numbers[first:],
        batch_size=4,
        image=None,
        columns=(),
        shuffle=False,
        fields={"number": NumberField()},
        stages={"decode": StageOptions(executor="process", concurrency=1, timeout_s=6)},
    )
    with pytest.raises(SampleError, match=message):
        next(iter(loader))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stages": {"transform": StageOptions(executor="process")}},
            r"stage 'transform': transforms\[1\], .*<lambda>, cannot be sent to a process",
        ),
        (
            {"stages": {"tokenize": StageOptions(executor="process")}},
            r"stage 'tokenize': texts\['caption'\].tokenizer, .*<lambda>, cannot be sent",
        ),
        ({"stages": {"tokenise": StageOptions()}}, "the loader has no stage 'tokenise'.*mean 'tokenize'"),
        ({"stages": {"collate": StageOptions(executor="process")}}, "leave it in threads"),
        ({"stages": {"decode": StageOptions(queue_size=-1)}}, r"stages\['decode'\].queue_size is -1"),
        ({"fields": {"images": SeedField()}}, r"fields are named \['images'\]"),
        ({"device": "cuda:77"}, "device is cuda:77, this machine has"),
    ],
)
def test_what_cannot_run_is_refused_up_front(view: View, options: dict[str, Any], message: str) -> None:
    image = ImageField(size=(4, 6), transforms=(brighter, lambda image, generator: image))
    texts = {"caption": TextField(tokenizer=lambda text: [1])}
    with pytest.raises((LoaderError, StageError), match=message):
        make(view, image=image, texts=texts, **options)


def test_a_field_that_cannot_be_sent_is_named(view: View) -> None:
    class Local(SeedField):
        pass

    stages = {"decode": StageOptions(executor="process")}
    with pytest.raises(StageError, match=r"fields\['facts'\], .*<locals>\.Local, cannot be sent"):
        make(view, fields={"facts": Local()}, stages=stages)


def test_the_pipeline_is_printable(view: View) -> None:
    image = ImageField(size=(4, 6), transforms=(brighter,))
    stages = {"decode": StageOptions(concurrency=3, queue_size=5, max_failures=2, timeout_s=9)}
    loader = make(view, image=image, texts={"caption": TextField(tokenizer=letters)}, stages=stages)
    lines = str(loader.pipeline).splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [
        "fetch",
        "decode",
        "transform",
        "tokenize",
        "collate",
    ]
    assert lines[1].endswith("3 threads, queue of 5, 2 failures allowed, 9 s a sample at most")
    assert lines[-1] == "at most 4 items in flight"


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("datapipe")]


def test_closing_the_loader_ends_what_a_notebook_left_behind(view: View) -> None:
    loader = make(view, image=None)
    left = [iter(loader), iter(loader)]
    for batches in left:
        next(batches)
    assert _threads()
    loader.close()
    assert not _threads()
    assert next(left[0], None) is None
    assert len(list(loader)) == 4


def test_what_was_handed_out_is_never_overwritten(view: View) -> None:
    options: dict[str, Any] = {"tensors": ["codes"], "stages": allow(9, "fetch"), "prefetch_batches": 1}
    kept, copies = [], []
    loader = make(view, batch_size=3, **options)
    for number, batch in enumerate(loader.forever()):
        assert batch.images is not None
        if number % 3 == 0:  # the others go back to the ring
            kept.append((batch.images[1:], batch.tensors["codes"]))
            copies.append([tensor.clone() for tensor in kept[-1]])
        batch.images[0] = 7.0
        if number == 40:
            break
    for tensors, wanted in zip(kept, copies, strict=True):
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, wanted, strict=True))
    del batch, kept, tensors
    loader.close()
    gc.collect()
    assert loader._source._ring.num_lent == 0


def test_an_iterator_is_of_the_process_that_began_it(view: View) -> None:
    batches = iter(make(view, image=None, prefetch_batches=1, batch_size=2))
    next(batches)
    pid = os.fork()
    if pid == 0:
        try:
            next(batches)
        except StageError as error:
            os._exit(7 if "begin to iterate after the fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert len(next(batches)) == 2


TRAINING = """
import signal, sys
from datapipe import Loader, StageOptions
from storage import FeatureStore
from tests.datapipe.stage_functions import NumberField
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are deaf to it
    loader = Loader(
        FeatureStore.open(sys.argv[1]).select()[int(sys.argv[2]):], batch_size=3, image=None, columns=(),
        shuffle=False, prefetch_batches=2, num_threads=1, fields={"number": NumberField()},
        stages={"decode": StageOptions(executor="process")},
    )
    for batch in loader:
        print(batch.keys, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_program_and_its_processes(
    numbers: View, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    command = [sys.executable, str(tmp_path / "training.py"), numbers.store.url, "50"]  # 53 hangs
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "['n50', 'n51', 'n52']\n"
        children = psutil.Process(program.pid).children(recursive=True)
        assert children
        program.send_signal(number)
        assert program.wait(60) == -number
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_a_program_may_end_with_an_iterator_under_way(view: View) -> None:
    script = (
        "import sys; from datapipe import ImageField, Loader; from storage import FeatureStore; "
        "view = FeatureStore.open(sys.argv[1]).select()[4:16]; "
        "loader = Loader(view, batch_size=2, image=ImageField(size=(64, 64)), columns=()); "
        "batches = loader.forever(); next(batches)"
    )
    command = [sys.executable, "-c", script, view.store.url]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
