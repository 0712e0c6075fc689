"""What lies in folders, archives and tables beside the ordinary."""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from datapipe.errors import DecodeError, SourceError
from datapipe.sources import Fault, Note, Record, TextRows, open_sources
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.text_rows import one_by_one


def items(path: Path, **options: object) -> list[Record | Fault | Note]:
    (source,) = open_sources([path], **options)  # type: ignore[arg-type]
    source.observe_columns(ColumnKinds())
    return list(one_by_one(source.items()))


def reasons(path: Path, **options: object) -> list[str]:
    return [item.reason for item in items(path, **options) if not isinstance(item, Record)]


def records(path: Path, **options: object) -> dict[str, Record]:
    return {str(item.key): item for item in items(path, **options) if isinstance(item, Record)}


def tar(*members: tuple[str, bytes] | tarfile.TarInfo, format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            archive.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def linked(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


PAIR = (("a.png", b"pixels"), ("a.txt", b"caption"))


# Folders


def test_pipes_directories_and_loops(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "dir.jpg").mkdir(parents=True)
    os.mkfifo(folder / "pipe.jpg")
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "self.png").symlink_to(folder / "self.png")
    (folder / "dead.png").symlink_to(folder / "nothing.png")
    (folder / "out.png").symlink_to("/etc/hostname")
    (folder / "a.png").write_bytes(b"pixels")
    (folder / "a.txt").write_text("caption")
    found = items(folder)
    told = {(item.place, item.reason) for item in found if isinstance(item, Fault)}
    assert told == {
        *{("dir.jpg", "not_a_file"), ("pipe.jpg", "not_a_file"), ("dead.png", "not_a_file")},
        *{("self.png", "not_a_file"), ("out.png", "path_outside_folder")},
    }
    assert [item.key for item in found if isinstance(item, Record)] == ["a"]
    with pytest.raises(SourceError, match=r"no such file"):
        os.mkfifo(tmp_path / "pipe.tar")
        open_sources([tmp_path / "pipe.tar"])


def test_a_file_that_shrinks_or_goes_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar(*PAIR, ("b.png", b"x" * 5000), ("b.txt", b"b")))
    found = records(tmp_path / "s.tar")
    load = found["s/b"].load
    assert load is not None
    os.truncate(tmp_path / "s.tar", 4000)
    with pytest.raises(DecodeError, match=r"truncated: 'b.png': \d+ of 5000 bytes"):
        load()
    (tmp_path / "s.tar").unlink()
    with pytest.raises(DecodeError, match=r"unreadable_file"):
        load()


# Tars


def test_tar_members_that_are_no_files(tmp_path: Path) -> None:
    members = [
        *PAIR,
        linked("b.png", tarfile.LNKTYPE, "./a.png"),
        ("b.txt", b"a hard link"),
        linked("c.png", tarfile.LNKTYPE, "nowhere.png"),
        ("c.txt", b"a link to nothing"),
        linked("d.png", tarfile.SYMTYPE, "/etc/passwd"),
        linked("e.png", tarfile.FIFOTYPE),
        linked("f.png", tarfile.CHRTYPE),
        linked("dir.png", tarfile.DIRTYPE),
    ]
    (tmp_path / "s.tar").write_bytes(tar(*members))
    found = records(tmp_path / "s.tar")
    assert found["s/b"].load is not None and found["s/b"].load() == b"pixels"
    assert found["s/c"].load is None  # refused by ingest as image_missing
    assert reasons(tmp_path / "s.tar") == ["ignored_member"] * 4


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("./a/./b", "s/a/b"),
        ("././b", "s/b"),
        ("a//b", "s/a/b"),
        ("line\nbreak", "s/line\nbreak"),
        ("日本/語", "s/日本/語"),
        (" b ", "s/ b "),
    ],
)
def test_names_in_tars(tmp_path: Path, name: str, key: str) -> None:
    (tmp_path / "s.tar").write_bytes(tar((f"{name}.png", b"x"), (f"{name}.txt", b"y")))
    assert list(records(tmp_path / "s.tar")) == [key]


def test_halves_of_a_sample_under_two_spellings_come_together(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar(("./x/a.png", b"x"), ("x/./a.txt", b"y")))
    (record,) = records(tmp_path / "s.tar").values()
    assert record.caption == "y" and record.load is not None


@pytest.mark.parametrize(
    "name", ["/abs/a.png", "../a.png", "x/../../a.png", "..\\a.png", "C:/a.png", "/../a.png"]
)
def test_names_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "s.tar").write_bytes(tar((name, b"x")))
    assert reasons(tmp_path / "s.tar") == ["unsafe_path"]


def test_a_tar_in_a_tar_is_a_field_of_no_meaning(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar(("a.tar", tar(*PAIR)), *PAIR))
    assert reasons(tmp_path / "s.tar") == ["ignored_field"]


EMPTY = tar()


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("s.tar", b"", ["empty"]),
        ("s.tar", EMPTY, []),
        ("s.tar.gz", gzip.compress(EMPTY, mtime=0), []),
        ("s.tar.zst", b"", ["empty"]),
        ("s.tar", b"PK\x03\x04 a zip under another name" * 40, ["bad_tar_header"]),
        ("s.tar", b"<html>not found</html>", ["bad_tar_header"]),
        ("s.tar", tar(*PAIR) + tar(*PAIR), ["data_after_end"]),
        ("s.tar.gz", tar(*PAIR), []),  # the suffix says gz, the content is plain
        ("s.tar", zstandard.compress(tar(*PAIR)), []),  # and the other way round
        ("s.tar.bz2", bz2.compress(tar(*PAIR)), []),
        ("s.tar.gz", gzip.compress(tar(*PAIR), mtime=0) + b"garbage", ["truncated_tar"]),
        ("s.tar.gz", gzip.compress(tar(*PAIR), mtime=0) + b"\0" * 512, []),
        (
            "s.tar.gz",
            gzip.compress(tar(*PAIR)[:1024], mtime=0) + gzip.compress(tar(*PAIR)[1024:], mtime=0),
            [],
        ),
        ("s.tar.zst", zstandard.compress(tar(*PAIR)[:700]) + zstandard.compress(tar(*PAIR)[700:]), []),
        ("s.tar.zst", zstandard.compress(tar(*PAIR))[:-9], ["truncated_tar"]),
        ("s.tar.zst", zstandard.compress(tar(*PAIR)) + b"garbage", ["truncated_tar"]),
    ],
)
def test_archives_of_all_kinds(tmp_path: Path, name: str, data: bytes, told: list[str]) -> None:
    (tmp_path / name).write_bytes(data)
    assert reasons(tmp_path / name) == told
    if len(data) > 2000 or name.endswith("zst"):
        assert len(records(tmp_path / name)) <= 1


def test_sparse_members_are_told(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.png")
    info.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "s.tar").write_bytes(tar(info, ("b.png", b"x"), ("b.txt", b"y"), format=tarfile.GNU_FORMAT))
    assert "ignored_member" in reasons(tmp_path / "s.tar") and "s/b" in records(tmp_path / "s.tar")


def test_videos_and_conversations_in_tars(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "<video> what?"}], "n": 1}
    none = {"messages": [{"role": "user", "content": "<image> what?"}]}
    (tmp_path / "s.tar").write_bytes(
        tar(("a.mp4", b"v"), ("a.json", json.dumps(talk).encode()), ("b.json", json.dumps(none).encode()))
    )
    found = items(tmp_path / "s.tar")
    assert isinstance(found[0], Record) and found[0].columns["num_media"] == 1
    assert found[0].optional == {"caption"}
    assert isinstance(found[1], Fault) and found[1].reason == "image_count"


# CSV and JSON lines


def test_csv_quirks(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(
        b'\xef\xbb\xbfcaption,n\r\n"two\nlines, ""quoted""",1\r\n\r\nshort\r\nok,2\r\n"open,3\r\n'
    )
    found = items(tmp_path / "t.csv", format="prompts")
    assert [item.caption if isinstance(item, Record) else (item.place, item.reason) for item in found] == [
        *('two\nlines, "quoted"', ("t.csv:5", "ragged_row"), "ok", ("t.csv:7", "bad_csv"))
    ]
    (tmp_path / "u.tsv").write_text("caption\tn\nx,y\t1\n")
    assert next(iter(records(tmp_path / "u.tsv").values())).caption == "x,y"


def test_zst_frames_that_are_to_be_skipped(tmp_path: Path) -> None:
    skipped = bytes.fromhex("5f2a4d18 04000000") + b"size"  # pzstd begins with one
    frames = zstandard.compress(b"caption\na\n") + skipped + zstandard.compress(b"b\n")
    (tmp_path / "t.csv.zst").write_bytes(skipped + frames)
    assert [record.caption for record in records(tmp_path / "t.csv.zst").values()] == ["a", "b"]
    (tmp_path / "t.tar.zst").write_bytes(skipped + zstandard.compress(tar(*PAIR)))
    assert records(tmp_path / "t.tar.zst")["t/a"].caption == "caption"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.txt", "t.json"])
def test_wide_text_is_refused(tmp_path: Path, name: str, encoding: str) -> None:
    (tmp_path / name).write_text('{"caption": 1}\n', encoding=encoding)
    with pytest.raises(SourceError, match=r"UTF-16 or UTF-32; convert the file to UTF-8"):
        items(tmp_path / name)


@pytest.mark.slow
def test_a_field_of_200_megabytes_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "t.csv").open("wb") as file:
        file.write(b'caption\nok\n"')
        for _ in range(200):
            file.write(b"x" * 2**20)
        file.write(b'"\nnot read\n')
    assert reasons(tmp_path / "t.csv") == ["bad_csv"] and len(records(tmp_path / "t.csv")) == 1


def test_a_base64_picture_in_a_csv_field_is_no_large_field(tmp_path: Path) -> None:
    import base64

    data = b"\xff\xd8\xff" + b"x" * 300_000
    (tmp_path / "t.csv").write_text(f"image,caption\n{base64.b64encode(data).decode()},c\n")
    load = next(iter(records(tmp_path / "t.csv").values())).load
    assert load is not None and load() == data


def test_jsonl_quirks(tmp_path: Path) -> None:
    lines = [
        '{"caption": "a", "caption": "b"}',
        '{"caption": "x", "n": NaN, "i": 123456789012345678901234567890, "f": 1e999}',
        '{"caption": "\\ud800"}',
        "[" * 100_000,
        '["a list"]',
        "7",
        '{"caption": "last"} trailing',
        '{"n": ' + "9" * 5000 + "}",
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert reasons(tmp_path / "t.jsonl") == ["repeated_key", *["bad_json"] * 5]
    found = list(records(tmp_path / "t.jsonl").values())
    assert found[0].columns["i"] == 123456789012345678901234567890 and found[1].caption == "\ud800"


def test_json_arrays(tmp_path: Path) -> None:
    many = [{"caption": f"c{index}", "pad": "x" * 1000} for index in range(3000)]
    (tmp_path / "t.json").write_text(json.dumps(many, indent=1))
    found = records(tmp_path / "t.json")
    assert len(found) == 3000 and found["t/00003000"].caption == "c2999"
    for text, told in (
        ("[]", []),
        ('[{"a": 1}', ["bad_json"]),
        ('[{"a": 1}, 7]', ["bad_json"]),
        ('[{"a": 1}] and more', ["bad_json"]),
        ("[] [", ["bad_json"]),
        ('{"a": 1}', ["bad_json"]),
        ('[{"a": 1, "a": 2}, {"caption": "x"}]', ["repeated_key"]),
        ("", ["bad_json"]),
    ):
        (tmp_path / "u.json").write_text(text)
        assert reasons(tmp_path / "u.json") == told, text


def test_json_lines_under_the_name_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('\n {"caption": "a"}\nno json\n{"caption": "b"}\n')
    assert [record.caption for record in records(path).values()] == ["a", "b"]
    assert reasons(path) == ["bad_json"]
    for one_object in ('{"caption": "a"}', '{\n"caption": "a"\n}\n'):
        path.write_text(one_object)
        assert reasons(path) == ["bad_json"]


def test_a_nul_near_the_start_makes_no_wide_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"a\0b\nc\n")
    found = items(tmp_path / "t.txt")
    assert [item.caption for item in found if isinstance(item, Record)] == ["a\0b", "c"]  # judged later


def test_packed_tables_that_are_cut(tmp_path: Path) -> None:
    lines = b"".join(b'{"caption": "%d"}\n' % hash((index, 7)) for index in range(40_000))
    for name, packed in (
        ("t.jsonl.gz", gzip.compress(lines, mtime=0)),
        ("t.jsonl.zst", zstandard.compress(lines)),
    ):
        (tmp_path / name).write_bytes(packed[: len(packed) // 2])
        assert reasons(tmp_path / name) == ["bad_json"], name
    with pytest.raises(SourceError, match="unknown kind"):
        (tmp_path / "t.parquet.gz").write_bytes(gzip.compress(b"PAR1", mtime=0))
        items(tmp_path / "t.parquet.gz")


# Parquet


def test_parquet_columns_of_all_kinds(tmp_path: Path) -> None:
    day = datetime.datetime(2020, 1, 2, 3, 4, 5)
    table = pa.table(
        {
            "caption": pa.array(["one", "two"]).dictionary_encode(),
            "large": pa.array(["x", None], pa.large_string()),
            "label": pa.array([3, 4]).dictionary_encode(),
            "when": pa.array([day, None], pa.timestamp("us")),
            "nano": pa.array([1, None], pa.timestamp("ns")),
            "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
            "nested": pa.array([{"a": [1, 2]}, None]),
            "blob": pa.array([b"\x00\xff", None]),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    kinds = ColumnKinds()
    (source,) = open_sources([tmp_path / "t.parquet"])
    source.observe_columns(kinds)
    assert kinds.kind("label") == "int" and kinds.kind("when") == "string"
    first, second = list(one_by_one(source.items()))
    assert isinstance(first, Record) and isinstance(second, Record) and second.caption == "two"
    columns = kinds.convert(first.columns)
    assert columns["when"] == "2020-01-02T03:04:05" and columns["price"] == "1.50"
    assert columns["nested"] == '{"a": [1, 2]}' and columns["label"] == 3
    assert str(columns["nano"]).startswith("1970-01-01")


def test_parquet_without_rows_and_with_years_beyond_python(tmp_path: Path) -> None:
    pq.write_table(pa.table({"caption": pa.array([], pa.string())}), tmp_path / "t.parquet")
    assert items(tmp_path / "t.parquet") == []
    far = pa.array([2**60], pa.timestamp("us"))
    pq.write_table(pa.table({"caption": ["x"], "when": far}), tmp_path / "u.parquet")
    (record,) = records(tmp_path / "u.parquet").values()
    assert str(2**60) in str(record.columns["when"])


def test_text_tables_come_by_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"caption": ["x", "y"], "n": [1, 2]}), tmp_path / "t.parquet")
    (source,) = open_sources([tmp_path / "t.parquet"])
    (rows,) = source.items()
    assert isinstance(rows, TextRows) and len(rows) == 2 and rows.columns == {"n": [1, 2]}


def test_urls_in_tables_are_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"image": "https://example.org/a.jpg", "caption": "x"}\n')
    assert reasons(tmp_path / "t.jsonl") == ["remote_url"]


def test_names_that_the_system_does_not_look_up_cost_their_row(tmp_path: Path) -> None:
    rows = [{"image": "x" * 5000, "caption": "long"}, {"image": f"{'y' * 300}/a.png", "caption": "long"}]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert reasons(tmp_path / "t.jsonl") == ["unreadable_file"] * 2


def test_base64_of_box_files_is_no_path(tmp_path: Path) -> None:
    import base64

    avif = b"\0\0\0\x20ftypavif\0\0\0\0" + bytes(300)
    (tmp_path / "t.csv").write_text(f"image,caption\n{base64.b64encode(avif).decode()},c\n")
    load = next(iter(records(tmp_path / "t.csv").values())).load
    assert load is not None and load() == avif


@pytest.mark.parametrize(
    "head", ["\n\n", "sep=;\r\n", "SEP=;\n\n"], ids=["blank lines", "separator", "separator and blank"]
)
def test_lines_before_the_header_of_a_csv(tmp_path: Path, head: str) -> None:
    mark = ";" if "=" in head else ","
    (tmp_path / "t.csv").write_bytes(f"{head}caption{mark}n, m\r\na, b{mark}1\r\nshort\r\n".encode())
    if mark == ",":
        (tmp_path / "t.csv").write_bytes(f"{head}caption,n\na,1\nshort\n".encode())
    (found, fault) = items(tmp_path / "t.csv", format="prompts")
    assert isinstance(found, Record) and isinstance(fault, Fault)
    assert found.caption == ("a, b" if mark == ";" else "a")
    assert (fault.place, fault.reason) == (f"t.csv:{head.count(chr(10)) + 3}", "ragged_row")


@pytest.mark.parametrize(
    "data", [b"<!DOCTYPE html>\n<p>no, such file</p>\n", b"PK\x03\x04\x14\0", b"PAR1\x15\x04\n"]
)
def test_what_is_no_csv_is_refused_before_its_rows(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(SourceError, match="as no CSV file does"):
        items(tmp_path / "t.csv")


def test_a_time_zone_that_nobody_knows_is_told_in_utc(tmp_path: Path) -> None:
    when = pa.array([0, None], pa.timestamp("us", "Mars/Phobos"))
    lasting = pa.array([90, None], pa.duration("s"))
    pq.write_table(
        pa.table({"caption": ["a", "b"], "when": when, "lasting": lasting}), tmp_path / "t.parquet"
    )
    (source,) = open_sources([tmp_path / "t.parquet"])
    kinds = ColumnKinds()
    source.observe_columns(kinds)
    first = next(iter(one_by_one(source.items())))
    assert isinstance(first, Record)
    columns = kinds.convert(first.columns)
    assert columns == {"when": "1970-01-01 00:00:00.000000Z", "lasting": "0:01:30"}


def test_tables_in_partitions_get_their_columns(tmp_path: Path) -> None:
    for folder, caption in (
        ("split=train/lang=de", "a"),
        ("split=train/lang=en%20gb", "b"),
        ("split=val/lang=de", "c"),
    ):
        (tmp_path / "set" / folder).mkdir(parents=True)
        pq.write_table(pa.table({"caption": [caption]}), tmp_path / "set" / folder / "part-0.parquet")
    (tmp_path / "set" / "split=val" / "lang=__HIVE_DEFAULT_PARTITION__").mkdir()
    last = tmp_path / "set" / "split=val" / "lang=__HIVE_DEFAULT_PARTITION__" / "part-0.parquet"
    pq.write_table(pa.table({"caption": ["d"]}), last)
    (tmp_path / "set" / "_SUCCESS").touch()
    found: list[tuple[object, object, dict[str, object]]] = []
    for source in open_sources([tmp_path / "set"]):
        found += [
            (r.key, r.caption, dict(r.columns)) for r in one_by_one(source.items()) if isinstance(r, Record)
        ]
    assert found == [
        ("split=train/lang=de/part-0/00000001", "a", {"split": "train", "lang": "de"}),
        ("split=train/lang=en%20gb/part-0/00000001", "b", {"split": "train", "lang": "en gb"}),
        ("split=val/lang=__HIVE_DEFAULT_PARTITION__/part-0/00000001", "d", {"split": "val"}),
        ("split=val/lang=de/part-0/00000001", "c", {"split": "val", "lang": "de"}),
    ]
