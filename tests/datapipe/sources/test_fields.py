"""Key, picture and caption among the columns of a row."""

from __future__ import annotations

import pytest

from datapipe.errors import SourceError
from datapipe.sources import MISSING, FieldMap


def test_usual_names_are_known() -> None:
    picked = FieldMap().pick({"__key__": "k", "jpg": b"x", "text": "t", "label": 3})
    assert (picked.key, picked.image, picked.caption, picked.columns) == ("k", b"x", "t", {"label": 3})


def test_the_first_candidate_wins_and_the_others_stay() -> None:
    picked = FieldMap().pick({"path": "p", "image": b"x", "caption": "c", "text": "t", "key": 1})
    assert (picked.image, picked.caption, picked.columns) == (b"x", "c", {"path": "p", "text": "t"})


def test_absent_fields_are_missing_and_null_is_not() -> None:
    picked = FieldMap().pick({"caption": None})
    assert picked.key is MISSING and picked.image is MISSING and picked.caption is None


def test_a_map_names_fields_and_renames_columns() -> None:
    fields = FieldMap(mapping={"caption": "alt", "key": "id", "split": "subset"})
    picked = fields.pick({"id": "k", "alt": "a", "caption": "other", "subset": "rl", "image": "p"})
    assert (picked.key, picked.caption) == ("k", "a")
    assert picked.columns == {"user_caption": "other", "split": "rl"}


def test_names_of_the_index_and_of_sql_are_moved_aside() -> None:
    picked = FieldMap().pick({"Width": 1, "hash": 2, "": 3, "a\0b": 4, "self": 5, "row": 6})
    assert picked.columns == {
        **{"user_Width": 1, "user_hash": 2, "user_unnamed": 3, "ab": 4, "user_self": 5, "user_row": 6}
    }


def test_a_mapped_column_has_to_be_there() -> None:
    with pytest.raises(SourceError, match=r"t.csv: column 'captoin' \(mapped to 'caption'\).*mean 'caption'"):
        FieldMap(mapping={"caption": "captoin"}).check_columns(["image", "caption"], "t.csv")
