"""What paths and patterns open."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from datapipe.errors import SourceError
from datapipe.sources import FieldMap, FolderSource, TableSource, WebDatasetSource, open_sources
from datapipe.sources.record import Record


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("tars/s-000.tar", "tars/s-001.tar", "tars/s-002.tar.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w"):
            pass
    for name, text in (
        ("tables/a.csv", "id\n"),
        ("tables/b.jsonl", ""),
        ("photos/metadata.csv", "id\n"),
        ("photos/x.jpg", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "mixed" / "deep").mkdir(parents=True)
    (tmp_path / "mixed" / "t.csv").write_text("id\n")
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "kind", "names"),
    [
        ("tars/s-{000..001}.tar", WebDatasetSource, ["s-000.tar", "s-001.tar"]),
        ("tars/s-00[01].tar", WebDatasetSource, ["s-000.tar", "s-001.tar"]),
        ("tars/s-{000,002}.{tar,tar.gz}", None, []),
        ("tars", WebDatasetSource, ["s-000.tar", "s-001.tar", "s-002.tar.gz"]),
        ("tables", TableSource, ["a.csv", "b.jsonl"]),
        ("tables/*.csv", TableSource, ["a.csv"]),
        ("photos", FolderSource, ["photos"]),
        ("mixed", FolderSource, ["mixed"]),
    ],
)
def test_told_apart(root: Path, spec: str, kind: type | None, names: list[str]) -> None:
    if kind is None:
        with pytest.raises(SourceError, match="no such file"):
            open_sources([root / spec])
        return
    found = open_sources([root / spec])
    assert all(isinstance(source, kind) for source in found)
    assert [Path(source.name).name for source in found] == names


def test_several_sources_and_joined_patterns(root: Path) -> None:
    found = open_sources([root / "photos", f"{root}/tars/s-000.tar::{root}/tars/s-001.tar"])
    assert [Path(source.name).name for source in found] == ["photos", "s-000.tar", "s-001.tar"]


def test_a_source_that_is_named_twice_is_opened_once(root: Path) -> None:
    specs = [
        root / "tars" / "s-001.tar",
        f"{root}/tars/*.tar",
        root / "photos",
        root / "tables" / ".." / "photos",
    ]
    names = [source.name.rpartition("/")[2] for source in open_sources(specs)]
    assert names == ["s-001.tar", "s-000.tar", "photos"]


def test_names_do_not_depend_on_the_working_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert open_sources(["photos"])[0].name == open_sources([root / "photos"])[0].name


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("phots", {}, "no such file or folder; did you mean .*photos"),
        ("none/x", {}, "none does not exist either"),
        ("tars/*.zip", {}, "no file matches"),
        ("tars", {"format": "wds"}, "unknown format 'wds'; wanted one of folder, classes, webdataset"),
        ("photos", {"format": "webdataset"}, "holds no file that ends with .tar"),
        ("tables/a.csv", {"fields": FieldMap(mapping={"caption": "text"})}, "column 'text'"),
    ],
)
def test_errors_name_the_remedy(root: Path, spec: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_sources([root / spec], **options)  # type: ignore[arg-type]


def test_an_unknown_file(root: Path) -> None:
    (root / "x.xlsx").write_text("")
    with pytest.raises(SourceError, match="unknown kind of source"):
        open_sources([root / "x.xlsx"])
    with pytest.raises(SourceError, match="no source given"):
        open_sources([])


@pytest.mark.parametrize("prefix", ["p", "p/"])
def test_one_slash_stands_after_a_prefix(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    (source,) = open_sources([tmp_path / "prompts.txt"], key_prefix=prefix)
    assert [item.key for item in source.items() if isinstance(item, Record)] == ["p/prompts/00000001"]


def test_tables_that_differ_in_their_suffix_have_keys_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "prompts.txt").write_text("b\n")
    sources = open_sources([tmp_path], format="prompts")
    keys = [item.key for source in sources for item in source.items() if isinstance(item, Record)]
    assert keys == ["prompts/00000001", "prompts.txt/00000001"]
