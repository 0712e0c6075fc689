"""Files that rows name, and paths that would leave the folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datapipe.errors import DecodeError
from datapipe.sources.paths import file_loader, is_unsafe_path, locate_file, printable


@pytest.mark.parametrize("path", ["/a", "../a", "a/../../b", "C:\\a", "c:a", "..\\a", "\\\\server\\share"])
def test_unsafe(path: str) -> None:
    assert is_unsafe_path(path)


@pytest.mark.parametrize("path", ["a", "a/b", "a/../b", "./a", "a..b", "...", "a\\b"])
def test_safe(path: str) -> None:
    assert not is_unsafe_path(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "Sub").mkdir(parents=True)
    for name in ("a.jpg", "Sub/B.jpg", "twin.jpg", "TWIN.jpg", "caf\u00e9.jpg"):
        (root / name).write_bytes(b"x")
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    return root


@pytest.mark.parametrize(
    ("named", "found", "notes"),
    [
        ("a.jpg", "a.jpg", []),
        ("./a.jpg", "a.jpg", []),
        ("Sub\\B.jpg", "Sub/B.jpg", ["backslash_path"]),
        ("A.JPG", "a.jpg", ["case_mismatch"]),
        ("sub\\b.JPG", "Sub/B.jpg", ["backslash_path", "case_mismatch"]),
        ("cafe\u0301.jpg", "caf\u00e9.jpg", ["case_mismatch"]),
    ],
)
def test_spellings_that_can_mean_one_file_only(root: Path, named: str, found: str, notes: list[str]) -> None:
    path, said = locate_file(root, named, "t:1")
    assert path == root / found and [note.reason for note in said] == notes


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("Twin.jpg", "row_without_image"),
        ("ghost.jpg", "row_without_image"),
        ("", "row_without_image"),
        ("a\0.jpg", "row_without_image"),
        ("../secret.jpg", "path_outside_folder"),
        ("/etc/passwd", "path_outside_folder"),
        ("link.jpg", "path_outside_folder"),
        ("away/secret.jpg", "path_outside_folder"),
        ("C:a.jpg", "path_outside_folder"),
        ("Sub", "not_a_file"),
        ("pipe.jpg", "not_a_file"),
    ],
)
def test_what_cannot_be_used(root: Path, named: str, reason: str) -> None:
    (root / "link.jpg").symlink_to(root.parent / "secret.jpg")
    (root / "away").symlink_to(root.parent)
    (root / "C:a.jpg").write_bytes(b"x")
    os.mkfifo(root / "pipe.jpg")
    with pytest.raises(DecodeError) as caught:
        locate_file(root, named, "t:1")
    assert caught.value.reason == reason


def test_links_within_the_folder_are_followed(root: Path) -> None:
    (root / "link.jpg").symlink_to("a.jpg")
    (root / "folder").symlink_to("Sub")
    for named in ("link.jpg", "folder/B.jpg"):
        assert locate_file(root, named, "t:1") == (root / named, [])


def test_loading_a_pipe_or_a_lost_file_does_not_hang(root: Path) -> None:
    assert file_loader(root / "a.jpg")() == b"x"
    os.mkfifo(root / "pipe.jpg")
    for name, reason in (("pipe.jpg", "not_a_file"), ("gone.jpg", "unreadable_file"), ("Sub", "not_a_file")):
        with pytest.raises(DecodeError) as caught:
            file_loader(root / name)()
        assert caught.value.reason == reason


def test_printable() -> None:
    assert printable(os.fsdecode(b"caf\xe9.jpg")) == "caf\\udce9.jpg"
    assert printable("日本") == "日本"
