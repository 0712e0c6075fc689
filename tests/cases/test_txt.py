"""Field cases of captions, tables and metadata."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from datapipe import BadFractionError, IngestReport, SourceError, ingest
from storage import ColumnError, ColumnTypeError, CorruptionError, FeatureStore, QueryError
from storage.index_file import IndexFile


def png(seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def run(source: Path | list[Path], store: Path, **options: object) -> IngestReport:
    """Ingest and give the report, over budget or not."""
    try:
        # One picture serves many rows here.
        return ingest(source, store, duplicates="keep", **options)  # type: ignore[arg-type]
    except BadFractionError as error:
        return error.report


def write_jsonl(path: Path, rows: list[object]) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def column(store: Path, name: str) -> list[object]:
    return list(FeatureStore.open(store).select().column(name).to_pylist())


def test_txt_03_invalid_utf8_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "t.csv").write_bytes(b"image,caption\na.png,good\na.png,caf\xe9\na.png,also ok\n")
    (tmp_path / "t.jsonl").write_bytes(
        b'{"image":"a.png","caption":"caf\xe9"}\n{"image":"a.png","caption":"ok"}\n'
    )
    text = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.int32([0, 4, 6])), pa.py_buffer(b"caf\xe9ok")]
    )
    table = pa.table({"image": ["a.png", "a.png"], "caption": text})
    pq.write_table(table, tmp_path / "t.parquet")
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, data in (("x.png", png()), ("x.txt", b"caf\xe9"), ("y.png", png()), ("y.txt", b"ok")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    for name, place, detail in (
        ("t.csv", "t.csv:3", "0xe9"),
        ("t.jsonl", "t.jsonl:1", "byte 0xe9 at position 31"),
        ("t.parquet", "t.parquet#1", "byte 0xe9 at position 3"),
        ("t.arrow", "t.arrow#1", "byte 0xe9 at position 3"),
        ("t.tar", "t.tar!x.png @0", "byte 0xe9 at position 3"),
    ):
        report = run(tmp_path / name, tmp_path / f"store-{name}")
        assert report.reasons == {"not_utf8": 1}, name
        example = report.examples["not_utf8"][0]
        assert example.place == f"{tmp_path}/{place}" and detail in example.detail
        assert "ok" in column(tmp_path / f"store-{name}", "caption")[-1]


def test_txt_03_nul_is_refused_alike_everywhere(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (folder / "a.txt").write_bytes(b"x\0y")
    (folder / "t.csv").write_bytes(b"image,caption\na.png,x\0y\n")
    write_jsonl(folder / "t.jsonl", [{"image": "a.png", "caption": "x\0y"}])
    pq.write_table(pa.table({"image": ["a.png"], "caption": ["x\0y"]}), folder / "t.parquet")
    with tarfile.open(folder / "t.tar", "w") as tar:
        for name, data in (("a.png", png()), ("a.txt", b"x\0y")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    details = set()
    for source in (folder, *(folder / f"t.{kind}" for kind in ("csv", "jsonl", "parquet", "tar"))):
        report = run(source, tmp_path / f"store-{source.name}")
        assert report.reasons == {"nul_byte": 1}, source
        details.add(report.examples["nul_byte"][0].detail)
    assert details == {"caption holds a NUL character at position 1: 'x\\x00y'"}


def test_txt_04_captions_are_text_or_counted(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    values: list[object] = [None, float("nan"), 3.5, [], "", "  ", True, {"en": "x"}, 7, "good"]
    write_jsonl(
        tmp_path / "t.jsonl",
        [{"image": "a.png", "caption": value} for value in values] + [{"image": "a.png"}],
    )
    report = run(tmp_path / "t.jsonl", tmp_path / "store")
    assert report.reasons == {
        **{"caption_none": 1, "caption_nan": 1, "caption_number": 2, "caption_list": 1, "caption_empty": 2},
        **{"caption_bool": 1, "caption_dict": 1, "caption_missing": 1},
    }
    assert report.examples["caption_number"][0].place == f"{tmp_path}/t.jsonl:3"
    assert column(tmp_path / "store", "caption") == ["good"]
    relaxed = run(tmp_path / "t.jsonl", tmp_path / "store2", optional=("caption",))
    assert set(relaxed.reasons) == {
        "caption_nan",
        "caption_number",
        "caption_list",
        "caption_bool",
        "caption_dict",
    }
    assert column(tmp_path / "store2", "caption") == [None, None, None, "good", None]


def test_txt_04_parquet_nulls_and_nans(tmp_path: Path) -> None:
    table = pa.table({"image": [png(), png()], "caption": pa.array([None, 2.0], pa.float64())})
    pq.write_table(table, tmp_path / "t.parquet")
    report = run(tmp_path / "t.parquet", tmp_path / "store")
    assert report.reasons == {"caption_none": 1, "caption_number": 1}


def test_txt_06_types_are_chosen_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(png())
    base = {"image": "p.png", "caption": "x"}
    write_jsonl(tmp_path / "a.jsonl", [{**base, "m": [], "n": None, "i": 1}])
    write_jsonl(tmp_path / "b.jsonl", [{**base, "m": [{"k": 1}], "n": 2.5, "i": 2}])
    write_jsonl(tmp_path / "c.jsonl", [{**base, "m": None, "n": 1, "i": 3, "extra": True}])
    report = run([tmp_path / f"{name}.jsonl" for name in "abc"], tmp_path / "store")
    assert (report.num_added, report.num_bad) == (3, 0)
    store = FeatureStore.open(tmp_path / "store")
    assert [store.columns[name] for name in ("m", "n", "i", "extra")] == [
        "VARCHAR",
        "DOUBLE",
        "BIGINT",
        "BOOLEAN",
    ]
    assert column(tmp_path / "store", "m") == ["[]", '[{"k": 1}]', None]
    assert column(tmp_path / "store", "n") == [None, 2.5, 1.0]
    assert column(tmp_path / "store", "extra") == [None, None, True]


def test_txt_06_a_later_ingest_that_does_not_fit_names_everything(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(png())
    write_jsonl(tmp_path / "a.jsonl", [{"image": "p.png", "caption": "x", "score": 1}])
    write_jsonl(tmp_path / "b.jsonl", [{"image": "p.png", "caption": "x", "score": "high"}])
    run(tmp_path / "a.jsonl", tmp_path / "store")
    with pytest.raises(
        SourceError,
        match=r"'score' is int in the store, but string .*string at b.jsonl:1.*score_string=score",
    ):
        run(tmp_path / "b.jsonl", tmp_path / "store")
    assert run(tmp_path / "b.jsonl", tmp_path / "store", column_map={"score_string": "score"}).num_added == 1
    assert column(tmp_path / "store", "score_string") == [None, "high"]


def test_txt_08_mixed_and_large_values_survive(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(png())
    base = {"image": "p.png", "caption": "x"}
    rows = [
        {
            **base,
            "score": 1,
            "date": "2020-01-01",
            "id": 18446744073709551615,
            "code": "007",
            "big": 2**53 + 1,
        },
        {**base, "score": "x", "date": "unknown", "id": 5, "code": "7", "big": 0.5},
    ]
    write_jsonl(tmp_path / "t.jsonl", rows)
    assert run(tmp_path / "t.jsonl", tmp_path / "store").num_bad == 0
    store = tmp_path / "store"
    assert column(store, "score") == ["1", "x"]
    assert column(store, "date") == ["2020-01-01", "unknown"]
    assert column(store, "id") == ["18446744073709551615", "5"]
    assert column(store, "code") == ["007", "7"]
    assert column(store, "big") == ["9007199254740993", "0.5"]


def test_txt_08_csv_and_parquet_ids(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(png())
    (tmp_path / "t.csv").write_text("image,caption,id,big\np.png,x,007,18446744073709551615\n")
    table = {"image": ["p.png"], "caption": ["x"], "id": ["007"], "big": pa.array([2**64 - 1], pa.uint64())}
    pq.write_table(pa.table(table), tmp_path / "u.parquet")
    run([tmp_path / "t.csv", tmp_path / "u.parquet"], tmp_path / "store")
    assert column(tmp_path / "store", "id") == ["007", "007"]
    assert column(tmp_path / "store", "big") == ["18446744073709551615"] * 2


def test_txt_09_two_columns_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(png())
    doubled = pa.Table.from_arrays(
        [pa.array(["p.png"]), pa.array(["a"]), pa.array(["b"])], ["image", "caption", "caption"]
    )
    pq.write_table(doubled, tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("image,caption,caption\np.png,a,b\n")
    for name in ("t.parquet", "t.csv"):
        with pytest.raises(SourceError, match=rf"{name}: columns 2 and 3 are both named 'caption'"):
            run(tmp_path / name, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("one", "other", "ours"), [("user_row", "row", "user_row"), ("m\0z", "mz", "mz")])
def test_txt_09_two_columns_that_would_get_one_name(tmp_path: Path, one: str, other: str, ours: str) -> None:
    row = {"image": "p.png", "caption": "x", one: "1", other: "2"}
    (tmp_path / "p.png").write_bytes(png())
    write_jsonl(tmp_path / "t.jsonl", [{"image": "p.png", "caption": "x"}, row])
    with pytest.raises(SourceError, match=rf"t.jsonl:2: columns .* would both be stored as '{ours}'"):
        run(tmp_path / "t.jsonl", tmp_path / "store")
    if "\0" not in one:
        (tmp_path / "t.csv").write_text(f"image,caption,{one},{other}\np.png,x,1,2\n")
        with pytest.raises(SourceError, match=rf"t.csv: columns .* would both be stored as '{ours}'"):
            run(tmp_path / "t.csv", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_txt_09_repeated_json_keys(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(png())
    lines = ['{"caption": "a", "image": "p.png", "caption": "b"}', {"image": "p.png", "caption": "good"}]
    write_jsonl(tmp_path / "t.jsonl", [*lines, '{"image": "p.png", "caption": "c", "m": {"k": 1, "k": 2}}'])
    report = run(tmp_path / "t.jsonl", tmp_path / "store")
    assert report.reasons == {"repeated_key": 2}
    first = report.examples["repeated_key"][0]
    assert first.place.endswith("t.jsonl:1") and "'caption' stands at positions 1 and 3" in first.detail
    assert column(tmp_path / "store", "caption") == ["good"]


def test_txt_10_orphans_and_spellings(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    for name in ("one.png", "sub/two.PNG", "three.png"):
        (folder / name).write_bytes(png())
    (folder / "metadata.csv").write_text(
        "file_name,caption\nOne.png,first\nsub\\two.PNG,second\nghost.png,gone\n"
    )
    (folder / "notes.zip").write_bytes(b"PK\x03\x04")
    report = run(folder, tmp_path / "store")
    assert report.reasons == {"row_without_image": 1, "image_without_row": 1}
    assert report.examples["row_without_image"][0].place == f"{folder}/metadata.csv:4"
    assert "'ghost.png'" in report.examples["row_without_image"][0].detail
    assert report.examples["image_without_row"][0].place == f"{folder}/three.png"
    assert report.notes == {"case_mismatch": 1, "backslash_path": 1, "ignored_file": 1}
    store = FeatureStore.open(tmp_path / "store")
    assert store.select().keys() == ["one", "sub/two"]


def test_txt_10_orphans_are_counted_with_five_examples(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for index in range(9):
        (folder / f"{index}.png").write_bytes(png())
        (folder / f"lost{index}.txt").write_text("a caption without a picture")
    (folder / "README.txt").write_text("no caption")
    report = run(folder, tmp_path / "store")
    assert report.reasons == {"caption_missing": 9, "caption_without_image": 9}
    assert len(report.examples["caption_without_image"]) == 5
    assert report.notes == {"ignored_file": 1}


def test_txt_10_metadata_under_the_wrong_name_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "1.png").write_bytes(png())
    (folder / "captions.csv").write_text("file_name,caption\n1.png,first\n")
    report = run(folder, tmp_path / "store")
    assert report.reasons == {"caption_missing": 1}
    assert "captions.csv" in report.note_examples["ignored_file"][0].place
    (folder / "metadata.csv").write_text("file_name,caption\n1.png,first\n")
    (folder / "metadata.jsonl").write_text('{"file_name": "1.png", "caption": "first"}\n')
    with pytest.raises(SourceError, match=r"metadata.csv and metadata.jsonl both describe"):
        run(folder, tmp_path / "store")


def test_txt_03_the_store_takes_valid_text_only_and_keeps_nul(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    for bad in ("caf\udce9", {"deep": ["caf\udce9"]}):
        with pytest.raises(
            ColumnTypeError, match=r"row 1 of the commit, key 'b'.*'caption' is not valid UTF-8"
        ):
            store.append([{"key": "a", "caption": "ok"}, {"key": "b", "caption": bad}])
    with pytest.raises(ColumnError, match="not valid UTF-8"):
        store.append([{"key": "caf\udce9"}])
    store.append([{"key": "k\0ey", "caption": "x\0y"}, {"key": "plain", "caption": "x"}])
    store = store.refresh()
    assert store.select().column("caption").to_pylist() == ["x\0y", "x"] and store.row("k\0ey") == 0
    assert store.query("SELECT length(caption) FROM samples ORDER BY row")[0].to_pylist() == [3, 1]
    assert store.select("caption = 'x' || chr(0) || 'y'").keys() == ["k\0ey"]
    latin = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.int32([0, 4])), pa.py_buffer(b"caf\xe9")]
    )
    with pytest.raises(QueryError, match=r"table 'mine' is damaged: .*UTF"):
        store.query("SELECT * FROM mine", tables={"mine": pa.table({"caption": latin})})


def test_txt_06_the_schema_of_a_store_is_the_union_of_its_commits(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    store.append([{"key": "a", "m": None, "n": None}])
    store.append([{"key": "b", "m": [], "n": 1}])
    part = store.append([{"key": "c", "m": [{"k": 1}], "extra": True}]).parts[1]
    since = rf"since part {part.id} \(row 1\)"
    with pytest.raises(
        ColumnTypeError,
        match=rf"row 0 of the commit, key 'd': column 'n' is string \('x'\), but int {since}",
    ):
        store.append([{"key": "d", "n": "x"}])
    store = store.refresh()
    assert store.query("SELECT m, n, extra FROM samples ORDER BY row").to_pylist() == [
        {"m": None, "n": None, "extra": None},
        {"m": "[]", "n": 1, "extra": None},
        {"m": '[{"k": 1}]', "n": None, "extra": True},
    ]
    assert store.select("m->>'$[0].k' = '1'").keys() == ["c"]


def test_txt_08_the_store_changes_no_value(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    largest = 18446744073709551615
    with store.writer(columns={"id": "uint", "mixed": "json"}) as writer:
        writer.add("a", id=largest, mixed=1, date="2020-01-01", code="007", big=2**53 + 1)
        writer.add("b", id=np.uint64(5), mixed="x", date="unknown", code="7", big=-(2**63))
        for value in (-1, largest + 1, 0.5, "5", True):
            with pytest.raises(ColumnTypeError, match=r"column 'id' is .*, but uint"):
                writer.add("c", id=value)
    store.append([{"key": "d", "id": 2**63}])
    store = store.refresh()
    assert store.columns["id"] == "UBIGINT"
    assert store.select().to_arrow(["id", "mixed", "date", "code", "big"]).to_pylist() == [
        {"id": largest, "mixed": "1", "date": "2020-01-01", "code": "007", "big": 2**53 + 1},
        {"id": 5, "mixed": '"x"', "date": "unknown", "code": "7", "big": -(2**63)},
        {"id": 2**63, "mixed": None, "date": None, "code": None, "big": None},
    ]
    assert store.select(f"id = {largest}").keys() == ["a"] and store.select("id > 9000").keys() == ["a", "d"]
    store.compact()
    assert store.refresh().query("SELECT max(id) FROM samples")[0].to_pylist() == [largest]
    with pytest.raises(ColumnTypeError, match="declare the column as uint or json"):
        store.append([{"key": "e", "big": largest}])


def test_txt_09_the_store_never_has_two_columns_of_one_name(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    with pytest.raises(ColumnError, match="'caption' and 'Caption' differ only in case"):
        store.append([{"key": "a", "caption": "x", "Caption": "y"}])
    doubled = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["caption", "caption"])
    pq.write_table(doubled, tmp_path / "doubled.parquet")
    for table in (doubled, tmp_path / "doubled.parquet"):
        with pytest.raises(QueryError, match="columns 1 and 2 are both named 'caption'"):
            store.query("SELECT * FROM mine", tables={"mine": table})
    with pytest.raises(CorruptionError, match="columns 1 and 2 are both named 'caption'"):
        IndexFile(tmp_path / "doubled.parquet", "here", 1, "doubled").column("caption", pa.large_string())
