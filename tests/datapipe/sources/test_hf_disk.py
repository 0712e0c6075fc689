"""Folders that `datasets.save_to_disk` writes, made here by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from datapipe import SourceError, ingest
from datapipe.sources import open_sources
from datapipe.sources.hf_disk import hf_tables, is_hf_folder
from storage import FeatureStore


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(buffer, "PNG")
    return buffer.getvalue()


def save(folder: Path, *files: list[str]) -> None:
    folder.mkdir(parents=True)
    names = [f"data-{index:05d}-of-{len(files):05d}.arrow" for index in range(len(files))]
    for name, colours in zip(names, files):
        image = [{"bytes": png(colour), "path": None} for colour in colours]
        table = pa.table({"image": image, "text": colours})
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_dictionary_of_splits(tmp_path: Path) -> None:
    save(tmp_path / "set" / "train", ["red", "lime"], ["blue"])
    save(tmp_path / "set" / "test", ["white"])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    report = ingest(tmp_path / "set", tmp_path / "store")
    assert (report.num_added, report.num_bad, report.notes) == (4, 0, {})
    view = FeatureStore.open(tmp_path / "store").select()
    assert view.column("split").to_pylist() == ["train", "train", "train", "test"]
    assert view.column("caption").to_pylist() == ["red", "lime", "blue", "white"]
    assert view.keys() == [
        *("train/data-00000-of-00002/00000001", "train/data-00000-of-00002/00000002"),
        *("train/data-00001-of-00002/00000001", "test/data-00000-of-00001/00000001"),
    ]
    assert ingest(tmp_path / "set", tmp_path / "store").num_skipped == 4


def test_one_dataset(tmp_path: Path) -> None:
    save(tmp_path / "set", ["red"])
    assert is_hf_folder(tmp_path / "set") and not is_hf_folder(tmp_path)
    assert [table.split for table in hf_tables(tmp_path / "set")] == [None]
    assert len(open_sources([tmp_path / "set"], format="hf")) == 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "not the description of a saved dataset"),
        ("{}", "not the description of a saved dataset"),
        ('{"_data_files": 3}', "wanted a list of dict"),
        ('{"_data_files": [{"filename": "lost.arrow"}]}', "lists 'lost.arrow', which is not in"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "lists '../x.arrow'"),
    ],
)
def test_broken_descriptions(tmp_path: Path, state: str, message: str) -> None:
    (tmp_path / "x.arrow").write_bytes(b"")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "state.json").write_text(state)
    with pytest.raises(SourceError, match=message):
        open_sources([tmp_path / "set"])
