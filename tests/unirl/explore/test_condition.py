from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.explore.condition import nearest_column, quote_columns, quote_name

COLUMNS = ("key", "stage", "reward", "reward/vlm", "reward/vlm/yes", "vlm", "a b", 'odd"one')


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("reward/vlm < 0.2 and stage = 'image'", "\"reward/vlm\" < 0.2 and stage = 'image'"),
        ("reward/vlm/yes > reward/vlm", '"reward/vlm/yes" > "reward/vlm"'),
        ("Reward/VLM<1", '"reward/vlm"<1'),
        ("reward / vlm > 2", "reward / vlm > 2"),
        ("reward/vlm2 > 1", "reward/vlm2 > 1"),
        ("my_reward/vlm > 1", "my_reward/vlm > 1"),
        ("key = 'reward/vlm'", "key = 'reward/vlm'"),
        ("key = 'it''s reward/vlm' or reward/vlm=1", "key = 'it''s reward/vlm' or \"reward/vlm\"=1"),
        (r"key = E'\' reward/vlm' or reward/vlm=1", r"key = E'\' reward/vlm' or " + '"reward/vlm"=1'),
        ('"reward/vlm" > 1', '"reward/vlm" > 1'),
        ('"x"" reward/vlm" > reward/vlm', '"x"" reward/vlm" > "reward/vlm"'),
        ("reward/vlm > 1 -- reward/vlm\nor vlm = 0", '"reward/vlm" > 1 -- reward/vlm\nor vlm = 0'),
        ("-- reward/vlm\nreward/vlm > 1", '-- reward/vlm\n"reward/vlm" > 1'),
        ("/* reward/vlm */ reward/vlm > 1", '/* reward/vlm */ "reward/vlm" > 1'),
        ("key = $$reward/vlm$$ or reward/vlm > 1", 'key = $$reward/vlm$$ or "reward/vlm" > 1'),
        ("key = $t$reward/vlm$t$", "key = $t$reward/vlm$t$"),
        ("a b = 1", '"a b" = 1'),
        ("samples.reward/vlm = 1", 'samples."reward/vlm" = 1'),
        ("key = 'never closed reward/vlm", "key = 'never closed reward/vlm"),
        ('odd"one" = 1', 'odd"one" = 1'),
    ],
)
def test_only_free_standing_column_names_are_quoted(sql: str, expected: str) -> None:
    assert quote_columns(sql, COLUMNS) == expected


def test_plain_names_need_no_quotes() -> None:
    assert quote_columns("stage = 'x' and reward > 1", ("stage", "reward")) == "stage = 'x' and reward > 1"


def test_quotes_inside_a_name_are_doubled() -> None:
    assert quote_name('a"b') == '"a""b"'


@given(st.text(alphabet="ab/'\"-*$ \n\\e", max_size=40))
def test_any_text_survives_where_no_column_needs_quotes(sql: str) -> None:
    assert quote_columns(sql, ("a", "b")) == sql


@given(st.text(alphabet="rv/'\"-*$ \n", max_size=40))
def test_quoting_twice_changes_nothing_more(sql: str) -> None:
    once = quote_columns(sql, ("r/v",))
    assert quote_columns(once, ("r/v",)) == once


def test_the_nearest_column_is_found_outside_of_strings() -> None:
    assert nearest_column("rewrd/vlm < 1", COLUMNS) == "reward/vlm"
    assert nearest_column("'rewrd/vlm' = stag", COLUMNS) == "stage"
    assert nearest_column("zzz = 1", COLUMNS) is None
