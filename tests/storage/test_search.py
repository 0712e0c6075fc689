from __future__ import annotations

import math
import unicodedata

import numpy as np
import pytest

from storage import ColumnError, FeatureStore, QueryError

CAPTIONS = [
    "a red circle on a blue square",
    "a red square",
    "reddish circles, not quite",
    None,
    "Red, RED and red again: a very red circle",
    'it\'s a "quoted" thing; DROP TABLE samples --',
    "Ein großer GRÜNER Kreis",
    "café au lait",
    "红色的圆形",
    "",
    "naïve circle",
]


@pytest.fixture
def store(empty):
    empty.append({"key": f"c{i}", "caption": caption, "n": i} for i, caption in enumerate(CAPTIONS))
    return empty.refresh()


def found(store: FeatureStore, text: str, **options: object) -> list[int]:
    return store.search(text, **options).rows.tolist()


def test_whole_words_are_ranked(store):
    assert found(store, "red circle") == [4, 0, 1, 10]
    assert found(store, "reddish") == [2] and found(store, "redd") == []
    assert found(store, "red circle", limit=2) == [4, 0]
    assert found(store, "circle circle") == found(store, "circle")


def test_the_scores_are_those_of_the_formula(store):
    """BM25 of Lucene, by hand, with lengths in characters."""
    texts = [caption for caption in CAPTIONS if caption is not None]
    mean = sum(map(len, texts)) / len(texts)
    counts = {0: (1, 1), 1: (1, 0), 4: (4, 1), 10: (0, 1)}
    having = (3, 3)

    def score(row: int) -> float:
        slack = 1.2 * (0.25 + 0.75 * len(CAPTIONS[row] or "") / mean)
        return sum(
            math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) * tf * 2.2 / (tf + slack)
            for tf, n in zip(counts[row], having)
        )

    assert found(store, "red circle") == sorted(counts, key=score, reverse=True)


def test_case_unicode_and_quotes(store):
    assert found(store, "grüner") == found(store, unicodedata.normalize("NFD", "GRÜNER")) == [6]
    assert found(store, "CAFÉ") == found(store, unicodedata.normalize("NFD", "café")) == [7]
    assert found(store, "cafe") == []
    assert found(store, "\"quoted\" 'thing'") == [5] and found(store, "it's") == [5]
    assert found(store, "samples; DROP TABLE samples --") == [5]
    assert found(store, "x' OR 1=1 --") == []
    assert found(store, "红色") == [8] and found(store, "圆") == [8] and found(store, "色红") == []
    assert found(store, "naïve") == [10] and found(store, "x\0red") == [4, 1, 0]


def test_what_cannot_be_searched(store):
    for text in ("", "  ", "!?", "\0"):
        with pytest.raises(QueryError, match="no word"):
            store.search(text)
    with pytest.raises(QueryError, match="UTF-8"):
        store.search("\ud800")
    with pytest.raises(ColumnError, match="did you mean 'caption'"):
        store.search("red", column="captoin")
    with pytest.raises(ColumnError, match="'n' is BIGINT"):
        store.search("red", column="n")
    assert found(store, "c4", column="key") == [4]


def test_empty_deleted_and_many_parts(empty, store):
    store.delete("n = 4")
    store.append([{"key": "late", "caption": "red red red"}])
    newest = store.refresh()
    assert found(newest, "red") == [11, 1, 0] and found(store, "red") == [4, 1, 0]
    assert isinstance(newest.search("red").rows, np.ndarray)
    assert found(newest, "nothing") == []


def test_an_empty_store(tmp_path):
    empty = FeatureStore.create(tmp_path / "none")
    with empty.writer(columns={"caption": "string"}) as writer:
        writer.add("a")
    assert found(empty.refresh(), "red") == []
