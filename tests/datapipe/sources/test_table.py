"""Tables: where the picture of a row is."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from datapipe.errors import SourceError
from datapipe.sources import Fault, Item, Record, TableSource


def items(path: Path, **options: object) -> list[Item]:
    return list(TableSource(path, **options).items())  # type: ignore[arg-type]


def test_pictures_as_bytes_paths_structs_and_uris(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(b"file")
    uri = "data:image/png;base64," + base64.b64encode(b"uri").decode()
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    structs = pa.array([{"bytes": b"inline", "path": "x.png"}, {"bytes": None, "path": "p.png"}, None], image)
    pq.write_table(pa.table({"image": structs}), tmp_path / "s.parquet")
    pq.write_table(pa.table({"img": [b"raw"]}), tmp_path / "b.parquet")
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"image": value}) for value in ("p.png", uri)))
    loaded = {}
    for name in ("s.parquet", "b.parquet", "t.jsonl"):
        for item in items(tmp_path / name):
            assert isinstance(item, Record)
            loaded[item.key] = None if item.load is None else item.load()
    assert loaded == {
        **{"s/00000001": b"inline", "s/00000002": b"file", "s/00000003": None, "b/00000001": b"raw"},
        **{"t/00000001": b"file", "t/00000002": b"uri"},
    }


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF"])
def test_pictures_as_bare_base64(tmp_path: Path, format: str) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((20, 20), 50).convert("RGB").save(buffer, format)
    text = base64.encodebytes(buffer.getvalue()).decode()
    (tmp_path / "t.jsonl").write_text(json.dumps({"image": text}))
    (item,) = items(tmp_path / "t.jsonl")
    assert isinstance(item, Record) and item.load is not None and item.load() == buffer.getvalue()


def test_pictures_that_cannot_be_found(tmp_path: Path) -> None:
    values = ["ghost.png", "../x.png", "data:image/png,abc", "data:image/png;base64,???", 7, True]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"image": value}) for value in values))
    found = items(tmp_path / "t.jsonl")
    assert [item.reason for item in found if isinstance(item, Fault)] == [
        *("row_without_image", "path_outside_folder", "bad_base64", "bad_base64", "image_other_type"),
        "image_other_type",
    ]
    assert found[0].place == "t.jsonl:1"


@pytest.mark.parametrize(
    ("prefix", "keys"),
    [(None, ["a", "5", "t/00000003"]), ("", ["a", "5", "t/00000003"]), ("p", ["p/a", "p/5", "p/t/00000003"])],
)
def test_keys(tmp_path: Path, prefix: str | None, keys: list[str]) -> None:
    (tmp_path / "t.jsonl").write_text('{"key": "a"}\n{"key": 5}\n{"caption": "x"}\n')
    found = [item.key for item in items(tmp_path / "t.jsonl", key_prefix=prefix) if isinstance(item, Record)]
    assert found == keys


def test_a_lost_table(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        TableSource(tmp_path / "none.csv")
