"""Picture folders: sidecars, tables, links, odd files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from datapipe.errors import DecodeError, SourceError
from datapipe.sources import Fault, FieldMap, FolderSource, Note, Record
from datapipe.sources.column_kinds import ColumnKinds


def write(root: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def records(root: Path, **options: object) -> dict[str, Record]:
    items = FolderSource(root, **options).items()  # type: ignore[arg-type]
    return {str(item.key): item for item in items if isinstance(item, Record)}


def faults(root: Path) -> dict[str, str]:
    found = {}
    for item in FolderSource(root).items():
        if isinstance(item, Fault):
            found[item.place] = item.reason
        elif isinstance(item, Record):
            try:
                item.caption_value()
            except DecodeError as error:
                found[item.place] = error.reason
    return found


def test_sidecars_of_all_kinds_in_all_levels(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{"a.jpg": b"A", "a.txt": "\ufeffcaption a\r\n", "x/y/b.PNG": b"B", "x/y/b.caption": " b \n\n"},
        **{"x/c.webp": b"C", "x/c.json": json.dumps({"text": "caption c", "score": 3, "split": "rl"})},
        **{"x/d.gif": b"D", "x/d.txt": "caption d", "x/d.json": '{"score": 4}'},
    )
    found = records(tmp_path)
    assert {key: record.caption_value() for key, record in found.items()} == {
        **{"a": "caption a", "x/c": "caption c", "x/d": "caption d", "x/y/b": " b "}
    }
    assert found["x/c"].columns == {"score": 3, "split": "rl"} and found["x/d"].columns == {"score": 4}
    assert found["x/y/b"].load is not None and found["x/y/b"].load() == b"B"
    assert FolderSource(tmp_path).count() == 4
    kinds = ColumnKinds()
    FolderSource(tmp_path).observe_columns(kinds)
    assert (kinds.kind("score"), kinds.kind("split")) == ("int", "string")


def test_prefix_and_map(tmp_path: Path) -> None:
    write(tmp_path, **{"a.jpg": b"A", "a.json": '{"words": "w", "caption": "other"}'})
    found = records(tmp_path, key_prefix="web", fields=FieldMap(mapping={"caption": "words"}))
    assert found["web/a"].caption == "w" and found["web/a"].columns == {"user_caption": "other"}


def test_sidecars_that_disagree_or_are_broken(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "a.jpg": b"A",
            "a.txt": "one",
            "a.caption": "two",
            "b.jpg": b"B",
            "b.txt": "b",
            "b.json": '{"caption": "c"}',
        },
        **{
            "c.jpg": b"C",
            "c.json": "{not json",
            "d.jpg": b"D",
            "d.txt": b"\xff",
            "e.jpg": b"E",
            "e.txt": "e",
            "e.caption": "e",
        },
    )
    assert faults(tmp_path) == {
        "a.jpg": "two_captions",
        "b.jpg": "two_captions",
        "c.jpg": "bad_json",
        "d.jpg": "not_utf8",
    }
    assert records(tmp_path)["e"].caption_value() == "e"


def test_tables_govern_their_folder(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{"train/metadata.csv": "file_name,text,label\nimages/1.jpg,one,cat\nimages/2.jpg,two,dog\n"},
        **{"train/images/1.jpg": b"1", "train/images/2.jpg": b"2", "train/images/3.jpg": b"3"},
        **{
            "train/images/4.jpg": b"4",
            "train/images/4.txt": "four",
            "test/5.jpg": b"5",
            "test/5.txt": "five",
        },
    )
    found = records(tmp_path)
    assert {key: record.caption_value() for key, record in found.items()} == {
        **{"train/images/1": "one", "train/images/2": "two", "train/images/4": "four", "test/5": "five"}
    }
    assert found["train/images/2"].place == "train/metadata.csv:3"
    assert found["train/images/2"].columns == {"label": "dog"}
    assert faults(tmp_path) == {"train/images/3.jpg": "image_without_row"}


def test_rows_may_bring_their_key(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{"1.jpg": b"1", "metadata.jsonl": '{"file_name": "1.jpg", "key": "first", "caption": "c"}'},
    )
    assert list(records(tmp_path, key_prefix="p")) == ["p/first"]


def test_odd_files(tmp_path: Path) -> None:
    root = write(
        tmp_path / "root",
        **{
            "a.jpg": b"A",
            "a.txt": "a",
            ".hidden.jpg": b"",
            "__MACOSX/._a.jpg": b"",
            "b.jpg/c.txt": "c",
            "z.zip": b"PK",
        },
    )
    write(tmp_path, **{"outside.jpg": b"O"})
    (root / "inside.jpg").symlink_to(root / "a.jpg")
    (root / "inside.txt").write_text("linked")
    (root / "out.jpg").symlink_to(tmp_path / "outside.jpg")
    (root / "dead.jpg").symlink_to(root / "nowhere.jpg")
    (root / "loop").symlink_to(root, target_is_directory=True)
    os.mkfifo(root / "pipe.jpg")
    assert sorted(records(root)) == ["a", "inside"]
    assert faults(root) == {
        **{"b.jpg": "not_a_file", "b.jpg/c.txt": "caption_without_image", "dead.jpg": "not_a_file"},
        **{"out.jpg": "path_outside_folder", "pipe.jpg": "not_a_file"},
    }
    notes = {item.place: item.reason for item in FolderSource(root).items() if isinstance(item, Note)}
    assert notes == {"loop": "link_not_followed", "z.zip": "ignored_file"}


def test_names_that_are_not_utf8_can_be_told(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    write(tmp_path, **{name: b"A", "caf\udce9.txt": "a"})
    found = next(item for item in FolderSource(tmp_path).items() if isinstance(item, Record))
    assert found.place == "caf\\udce9.jpg"


def test_upper_case_suffixes_and_stems(tmp_path: Path) -> None:
    write(tmp_path, **{"A.JPG": b"A", "a.TXT": "a"})
    items = list(FolderSource(tmp_path).items())
    assert [type(item) for item in items] == [Note, Record]
    assert isinstance(items[1], Record) and items[1].caption_value() == "a"


def test_stems_with_composed_and_decomposed_accents(tmp_path: Path) -> None:
    write(tmp_path, **{"caf\u00e9.jpg": b"A", "cafe\u0301.txt": "a"})
    items = list(FolderSource(tmp_path).items())
    assert [type(item) for item in items] == [Note, Record]
    assert isinstance(items[1], Record) and items[1].caption_value() == "a"


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not a folder"):
        FolderSource(tmp_path / "none")


def test_a_mapped_name_that_no_file_has_is_told(tmp_path: Path) -> None:
    write(tmp_path, **{"a.jpg": b"A", "a.txt": "caption"})
    for mapped in ({"caption": "alt"}, {"key": "id"}):
        with pytest.raises(SourceError, match=r"no row has '(alt|id)' \(mapped to '(caption|key)'\)"):
            FolderSource(tmp_path, fields=FieldMap(mapping=mapped)).observe_columns(ColumnKinds())
    write(tmp_path, **{"a.json": '{"alts": "b"}'})
    with pytest.raises(SourceError, match="did you mean 'alts'"):
        FolderSource(tmp_path, fields=FieldMap(mapping={"caption": "alt"})).observe_columns(ColumnKinds())
    with pytest.raises(SourceError, match=r"no row has 'zzz' \(mapped to 'alt'\)"):
        FolderSource(tmp_path, fields=FieldMap(mapping={"alt": "zzz"})).observe_columns(ColumnKinds())


def test_caption_files_that_a_table_stands_in_for_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.png").write_bytes(b"pixels")
    (folder / "metadata.csv").write_text("file_name,caption\na.png,of the table\n")
    (folder / "a.txt").write_text("of the file")
    (folder / "b.txt").write_text("of the file")
    found = list(FolderSource(folder).items())
    captions = {item.key: item.caption for item in found if isinstance(item, Record)}
    assert captions["a"] == "of the table" and len(captions) == 2
    (note,) = [item for item in found if isinstance(item, Note)]
    assert (note.place, note.reason) == ("a.txt", "ignored_file") and "only the table was read" in note.detail
