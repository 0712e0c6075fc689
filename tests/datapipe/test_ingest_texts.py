"""Texts by the column, conversations, pairs, and what was repaired since: from file to store."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from datapipe import BadFractionError, IngestReport, SourceError, ingest
from storage import FeatureStore


def png(seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def run(source: Path | list[Path], store: Path, **options: object) -> IngestReport:
    """Ingest and give the report, over budget or not."""
    try:
        return ingest(source, store, progress=False, **options)  # type: ignore[arg-type]
    except BadFractionError as error:
        return error.report


def rows(store: Path, columns: str = "*") -> list[dict[str, object]]:
    return list(FeatureStore.open(store).query(f"SELECT {columns} FROM samples ORDER BY row").to_pylist())


def write_jsonl(path: Path, values: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


@pytest.mark.parametrize("bad", [False, True])
def test_parquet_jsonl_and_csv_of_prompts_end_alike(tmp_path: Path, bad: bool) -> None:
    prompts: list[str | None] = [f"a picture of {index} cats, ü" for index in range(600)]
    if bad:
        prompts[70], prompts[300], prompts[301] = None, "  ", "x\0y"
    table = pa.table({"prompt": prompts, "n": range(600)})
    pq.write_table(table, tmp_path / "p.parquet")
    write_jsonl(tmp_path / "p.jsonl", table.to_pylist())
    reports = {}
    for kind in ("parquet", "jsonl"):
        reports[kind] = run(tmp_path / f"p.{kind}", tmp_path / kind, format="prompts")
    found = {kind: rows(tmp_path / kind, "key, caption, modality, n") for kind in reports}
    assert found["parquet"] == found["jsonl"] and len(found["jsonl"]) == (597 if bad else 600)
    reasons = {"caption_none": 1, "caption_empty": 1, "nul_byte": 1} if bad else {}
    assert [report.reasons for report in reports.values()] == [reasons, reasons]
    assert found["jsonl"][5] == {
        **{"key": "p/00000006", "caption": "a picture of 5 cats, ü", "modality": "text", "n": 5}
    }
    again = run(tmp_path / "p.parquet", tmp_path / "parquet", format="prompts")
    assert (again.num_added, again.num_skipped, again.num_bad) == (0, len(found["jsonl"]), 3 if bad else 0)


def test_numbers_that_became_null_and_nesting_without_end_are_told(tmp_path: Path) -> None:
    deep = "[" * 800 + "]" * 800
    lines = [
        '{"prompt": "a", "box": [1.5, NaN]}',
        '{"prompt": "b", "box": {"x": [1e999]}}',
        '{"prompt": "c"}',
    ]
    (tmp_path / "p.jsonl").write_text("\n".join([*lines, f'{{"prompt": "d", "box": {deep}}}']))
    report = run(tmp_path / "p.jsonl", tmp_path / "store", format="prompts")
    found = rows(tmp_path / "store", "caption, box")
    assert report.notes == {"number_became_null": 2} and report.reasons == {"bad_value": 1}
    assert [example.detail.split(":")[0] for example in report.note_examples["number_became_null"]] == [
        "box"
    ] * 2
    assert [row["box"] for row in found] == ["[1.5, null]", '{"x": [null]}', None]


def test_keys_that_meet_twice_are_found_in_blocks_too(tmp_path: Path) -> None:
    keys = [f"k{index}" for index in range(200)]
    pq.write_table(pa.table({"key": keys, "text": keys}), tmp_path / "a.parquet")
    keys[150], keys[151] = "k3", "new"
    pq.write_table(pa.table({"key": keys, "text": [f"other {key}" for key in keys]}), tmp_path / "b.parquet")
    report = run([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "s", optional=("image",))
    assert (report.num_added, report.reasons) == (201, {"duplicate_key": 199})
    assert len(rows(tmp_path / "s")) == 201


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\nx\0y\ncaf\xe9\nlast")
    report = run(tmp_path / "p.txt", tmp_path / "s")
    assert report.reasons == {"nul_byte": 1, "not_utf8": 1} and report.notes == {"blank_line": 1}
    assert [example.place for example in report.examples["not_utf8"]] == [f"{tmp_path}/p.txt:5"]
    assert [row["caption"] for row in rows(tmp_path / "s")] == ["one", "two", "last"]
    (tmp_path / "wide.txt").write_text("prompt", encoding="utf-16")
    with pytest.raises(SourceError, match="UTF-16"):
        run(tmp_path / "wide.txt", tmp_path / "t")


def test_conversations_with_several_pictures(tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.png").write_bytes(png(index))
    (tmp_path / "broken.png").write_bytes(png()[:60])
    ask = [{"from": "human", "value": "<image> and <image>?"}, {"from": "gpt", "value": "cats"}]
    values = [
        {"image": ["0.png", "1.png"], "conversations": ask},
        {"image": ["0.png", "broken.png"], "conversations": ask},
        {"image": "2.png", "conversations": ask},
        {"image": ["0.png", "2.png"], "conversations": ask},
        {"conversations": ask[1:]},
    ]
    (tmp_path / "llava.json").write_text(json.dumps(values))
    report = run(tmp_path / "llava.json", tmp_path / "s")
    assert report.reasons == {"truncated": 1, "image_count": 1}
    assert "llava/00000002#1" in report.examples["truncated"][0].detail
    found = {row["key"]: row for row in rows(tmp_path / "s")}
    assert set(found) == {
        *("llava/00000001", "llava/00000001#1", "llava/00000004", "llava/00000004#1", "llava/00000005")
    }
    extra = found["llava/00000004#1"]
    assert (extra["media_of"], extra["media_index"], extra["messages"]) == ("llava/00000004", 1, None)
    store = FeatureStore.open(tmp_path / "s")
    assert bytes(store.blob(store.row("llava/00000004#1"))) == png(2)
    assert found["llava/00000004"]["num_media"] == 2 and found["llava/00000005"]["modality"] == "text"
    again = run(tmp_path / "llava.json", tmp_path / "s")
    assert (again.num_added, again.num_bad) == (0, 2)


def test_picture_pairs(tmp_path: Path) -> None:
    for index in range(2):
        (tmp_path / f"{index}.png").write_bytes(png(index))
    (tmp_path / "copy.png").write_bytes(png(0))
    values: list[dict[str, object]] = [
        {"prompt": "a cat", "chosen": "0.png", "rejected": "1.png", "rater": "ann"},
        {"prompt": "a dog", "chosen": "0.png", "rejected": "copy.png"},
    ]
    write_jsonl(tmp_path / "pairs.jsonl", values)
    report = run(tmp_path / "pairs.jsonl", tmp_path / "s")
    assert report.reasons == {"identical_pair": 1}
    key = "pairs/00000001"
    assert rows(tmp_path / "s", "key, caption, pair, preferred, rater") == [
        {"key": f"{key}#1", "caption": "a cat", "pair": key, "preferred": False, "rater": "ann"},
        {"key": key, "caption": "a cat", "pair": key, "preferred": True, "rater": "ann"},
    ]


def test_required_columns(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "t.jsonl", [{"text": "x", "score": 1}, {"text": "y", "score": None}, {"text": "z"}]
    )
    options = {"optional": ("image",), "required": ("score",)}
    report = run(tmp_path / "t.jsonl", tmp_path / "s", **options)
    assert (report.num_added, report.reasons) == (1, {"score_missing": 2})
    assert run(tmp_path / "t.jsonl", tmp_path / "t", optional=("image",), required=("width",)).reasons == {
        "width_missing": 3
    }
    with pytest.raises(SourceError, match=r"'scroe' is in no source.*did you mean 'score'"):
        run(tmp_path / "t.jsonl", tmp_path / "s", optional=("image",), required=("scroe",))


def test_what_is_repaired_is_settled_in_the_quarantine(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.png").write_bytes(png(ord(name)) if name == "a" else b"<html>")
        (folder / f"{name}.txt").write_text(name)
    assert run(folder, tmp_path / "s").reasons == {"html": 2}
    (folder / "b.png").write_bytes(png(5))
    assert run(folder, tmp_path / "s").reasons == {"html": 1}
    store = FeatureStore.open(tmp_path / "s")
    assert store.quarantined().column("place").to_pylist() == [f"{folder}/c.png"]
    (folder / "c.png").unlink()
    (folder / "c.txt").unlink()
    assert run(folder, tmp_path / "s").num_bad == 0
    assert FeatureStore.open(tmp_path / "s").quarantined().num_rows == 0


def test_nested_names(tmp_path: Path) -> None:
    values = [{"meta": {"caption": "x", "tags": ["t0", "t1"]}}, {"meta": {"caption": "y"}}]
    write_jsonl(tmp_path / "t.jsonl", values)
    mapping = {"caption": "meta.caption", "tag": "meta.tags.0"}
    run(tmp_path / "t.jsonl", tmp_path / "s", optional=("image",), column_map=mapping)
    assert rows(tmp_path / "s", "caption, tag") == [
        {"caption": "x", "tag": "t0"},
        {"caption": "y", "tag": None},
    ]
    pq.write_table(pa.table({"meta": [{"caption": "z"}]}), tmp_path / "t.parquet")
    run(tmp_path / "t.parquet", tmp_path / "p", optional=("image",), column_map={"caption": "meta.caption"})
    assert rows(tmp_path / "p", "caption") == [{"caption": "z"}]
    with pytest.raises(SourceError, match=r"no row has 'mata.caption'.*found \['meta'\]"):
        run(tmp_path / "t.jsonl", tmp_path / "s", optional=("image",), column_map={"caption": "mata.caption"})


def test_class_folders(tmp_path: Path) -> None:
    for at, name in enumerate(("cats/1.png", "cats/2.png", "dogs/1.png")):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pets" / name).write_bytes(png(at))
    report = run(tmp_path / "pets", tmp_path / "s")
    assert (report.num_bad, report.notes) == (0, {"class_folders": 1})
    assert report.note_examples["class_folders"][0].place == str(tmp_path / "pets")
    assert [(row["key"], row["label"], row["caption"]) for row in rows(tmp_path / "s")] == [
        ("cats/1", "cats", None),
        ("cats/2", "cats", None),
        ("dogs/1", "dogs", None),
    ]
    assert run(tmp_path / "pets", tmp_path / "t", format="folder").reasons == {"caption_missing": 3}
    (tmp_path / "pets" / "3.png").write_bytes(png(9))
    assert run(tmp_path / "pets", tmp_path / "u", format="classes").reasons == {"no_class": 1}


def test_a_source_with_nothing_in_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "head.csv").write_text("prompt\n")
    (tmp_path / "zeros.tar").write_bytes(bytes(10_240))  # what a download that never began leaves
    (tmp_path / "p.txt").write_text("one\n")
    sources = [tmp_path / name for name in ("head.csv", "zeros.tar", "p.txt")]
    for dry_run in (10, None):
        report = run(sources, tmp_path / "s", dry_run=dry_run)
        assert (report.num_added, report.notes) == (1, {"no_samples": 2})
        places = [example.place for example in report.note_examples["no_samples"]]
        assert places == [str(path) for path in sources[:2]]
    assert run(sources, tmp_path / "s").notes == {}  # they are finished


def test_a_place_that_is_bad_for_another_reason_now_stands_once_in_the_quarantine(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    write_jsonl(path, [{"caption": None}, {"caption": "fine"}])
    for caption, reason in ((None, "caption_none"), (3, "caption_number"), ("", "caption_empty")):
        write_jsonl(path, [{"caption": caption}, {"caption": "fine"}])
        assert run(path, tmp_path / "s", optional=("image",)).reasons == {reason: 1}
        found = FeatureStore.open(tmp_path / "s").quarantined().column("reason").to_pylist()
        assert [text.partition(":")[0] for text in found] == [reason]
