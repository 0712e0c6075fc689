"""Damaged shards cost the rows in them and nothing else: no batch, no step, no other row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datapipe import ImageField, Loader, LoaderError, SampleError, StageOptions
from datapipe.fields import RawSample
from storage import FeatureStore, View
from tests.datapipe.test_loader import picture, png

NUM_ROWS = 30
DAMAGED = set(range(10, 20))
LENIENT = StageOptions(max_failures=NUM_ROWS)


def make_store(path: Path) -> View:
    """Three shards of ten rows."""
    store = FeatureStore.create(path)
    for start in range(0, NUM_ROWS, 10):
        store.append(
            {
                "key": f"{index:03d}",
                "blob": png(picture(index)),
                "caption": f"text {index}",
                "tensors": {"codes": np.full(3, index, np.int16)},
            }
            for index in range(start, start + 10)
        )
    return FeatureStore.open(path).select()


def damage(path: Path, pattern: str) -> None:
    """Flip all bytes of the second shard's file."""
    shard = sorted(path.glob(pattern))[1]
    shard.chmod(0o644)
    shard.write_bytes(bytes(byte ^ 255 for byte in shard.read_bytes()))


class FirstCode:
    needs_blob = False
    columns: tuple[str, ...] = ()
    tensors = ("codes",)

    def read(self, raw: RawSample) -> np.ndarray[Any, Any]:
        codes = raw.tensors["codes"]
        assert codes is not None
        return codes[:1]


PICTURES: Mapping[str, Any] = {
    "image": ImageField(size=(4, 6)),
    "stages": {"fetch": LENIENT, "decode": LENIENT},
}
TEXTS: Mapping[str, Any] = {"image": None, "stages": {"fetch": LENIENT}}
CODES: Mapping[str, Any] = {"image": None, "columns": (), "tensors": ["codes"], "stages": {"fetch": LENIENT}}
FIELDS: Mapping[str, Any] = {
    "image": None,
    "columns": (),
    "fields": {"first": FirstCode()},
    "stages": {"fetch": LENIENT},
}


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("index/*.parquet", PICTURES),
        ("index/*.parquet", TEXTS),
        ("index/*.keys.arrow", PICTURES),
        ("blobs/*/data.mdb", PICTURES),
        ("tensors/codes/*", CODES),
        ("tensors/codes/*", FIELDS),
    ],
)
def test_a_damaged_shard_costs_its_own_rows(tmp_path: Path, pattern: str, options: Mapping[str, Any]) -> None:
    view = make_store(tmp_path / "store")
    damage(tmp_path / "store", pattern)
    strict = {name: value for name, value in options.items() if name != "stages"}
    with pytest.raises(SampleError, match=r"sample '.*' \(row 1\d\): .*(checksum|copy)"):
        list(Loader(view, batch_size=4, drop_last=False, **strict))
    loader = Loader(view, batch_size=4, drop_last=False, num_threads=3, **options)
    seen: list[int] = []
    for step, batch in enumerate(loader):
        seen += batch.rows.tolist()
        assert [int(key) for key in batch.keys] == batch.rows.tolist()
        assert loader.state_dict()["consumed"] == min(4 * (step + 1), NUM_ROWS)
    assert step + 1 == len(loader) and sorted(seen) == sorted(set(range(NUM_ROWS)) - DAMAGED)
    assert sum(loader.stats().bad.values()) == len(DAMAGED)


def test_a_resume_over_a_damaged_shard_is_exact(tmp_path: Path) -> None:
    view = make_store(tmp_path / "store")
    damage(tmp_path / "store", "index/*.parquet")
    whole = [batch.rows.tolist() for batch in Loader(view, batch_size=4, **TEXTS)]
    stopped, resumed = Loader(view, batch_size=4, **TEXTS), Loader(view, batch_size=4, **TEXTS)
    running = iter(stopped)
    seen = [next(running).rows.tolist() for _ in range(3)]
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert seen + [batch.rows.tolist() for batch in resumed] == whole


def test_stages_of_whole_batches_have_no_budget(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match="stage 'collate': max_failures is 2; it works on whole batches"):
        Loader(make_store(tmp_path / "store"), batch_size=4, stages={"collate": StageOptions(max_failures=2)})
