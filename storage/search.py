"""Search for words in a text column, ranked by BM25.

score(d) = sum over words w of idf(w) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length(d) / mean length)),
idf(w) = ln(1 + (N - n + 0.5) / (n + 0.5)), with tf times that w stands in d, and n of N texts that have w.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", Foundations and
Trends in Information Retrieval 3(4), 2009, section 3; the idf, which is never negative, and the constants are
those of Lucene's BM25Similarity. A length is counted in characters.

There is no index to be kept up: SQL finds the rows that contain a word anywhere, and only in these are whole
words counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.arrow_numpy import to_numpy
from storage.errors import QueryError
from storage.query import quote

__all__ = ["search_rows"]

_K1 = 1.2
_B = 0.75
_NO_WORD = r"[^\pL\pN\pM]+"
_WORD_BYTES = np.array([byte if chr(byte).isalnum() and byte < 128 else 32 for byte in range(256)], np.uint8)
_WITHOUT_SPACES = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"


def search_rows(run: Callable[[str], pa.Table], column: str, text: str, limit: int) -> np.ndarray:
    """The rows whose text has at least one word of `text`, best first, int64 (at most limit,).

    Args:
        run: Gives the result of an SQL query over `samples`.
        column: Name of a text column; rows where it is null are not found.
        text: Words, in any case and any Unicode form. In scripts that put no spaces between words, each run
            of letters is sought as it stands.
        limit: At most so many rows; of equal ones the earlier first.

    Raises:
        QueryError: If there is no word in `text`.
    """
    words = _words(text)
    if not words:
        raise QueryError(f"there is no word to search for in {text[:80]!r}; give letters or digits")
    normal = f"lower(nfc_normalize({quote(column)}))"
    has_word = " OR ".join(f"contains({normal}, '{word}')" for word in words)
    found = run(
        f"SELECT row, ' ' || {normal} || ' ' AS text, length({quote(column)}) AS length "
        f"FROM samples WHERE {has_word}"
    ).combine_chunks()
    totals = run(f"SELECT count({quote(column)}) AS num, avg(length({quote(column)})) AS mean FROM samples")
    if not found.num_rows:
        return np.empty(0, np.int64)
    counts_WN = _count_words(found.column("text"), words)
    lengths_N = to_numpy(found.column("length"), np.int64)
    scores = _bm25(counts_WN, lengths_N, totals["num"][0].as_py(), totals["mean"][0].as_py())
    rows = to_numpy(found.column("row"), np.int64)
    hits = np.flatnonzero(counts_WN.any(axis=0))
    best: np.ndarray = rows[hits[np.lexsort((rows[hits], -scores[hits]))[:limit]]]
    return best


def _words(text: str) -> list[str]:
    try:
        given = pa.array([text], pa.large_string())
    except UnicodeEncodeError:
        raise QueryError(f"the text to search for is not valid UTF-8: {text[:80]!r}") from None
    normal = pc.utf8_lower(pc.utf8_normalize(given, "NFC"))
    return list(dict.fromkeys(pc.replace_substring_regex(normal, _NO_WORD, " ")[0].as_py().split()))


def _count_words(texts: pa.ChunkedArray, words: Sequence[str]) -> np.ndarray:
    """How often each word stands in each text, int64 (words, texts). Texts begin and end with a space."""
    counts_WN = np.zeros((len(words), len(texts)), np.int64)
    is_ascii_N = np.asarray(pc.string_is_ascii(texts).to_numpy())
    plain = _blank_out(texts.filter(pa.array(is_ascii_N)).combine_chunks())
    other = pc.replace_substring_regex(texts.filter(pa.array(~is_ascii_N)), _NO_WORD, "  ")
    without_spaces = pc.match_substring_regex(pa.array(words, pa.large_string()), _WITHOUT_SPACES)
    for at, (word, is_substring) in enumerate(zip(words, without_spaces.to_pylist())):
        if word.isascii():
            counts_WN[at, is_ascii_N] = pc.count_substring_regex(plain, rf"\b{word}\b").to_numpy()
        counts_WN[at, ~is_ascii_N] = pc.count_substring(
            other, word if is_substring else f" {word} "
        ).to_numpy()
    return counts_WN


def _blank_out(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Texts of ASCII with a space for every byte that is in no word."""
    _, ends, data = texts.buffers()
    if data is None:
        return texts
    return pa.LargeStringArray.from_buffers(
        len(texts), ends, pa.py_buffer(_WORD_BYTES[np.frombuffer(data, np.uint8)]), None, 0, texts.offset
    )


def _bm25(counts_WN: np.ndarray, lengths_N: np.ndarray, num_texts: int, mean_length: float) -> np.ndarray:
    """float64 (texts,)."""
    having_W = (counts_WN > 0).sum(axis=1)
    idf_W = np.log1p((num_texts - having_W + 0.5) / (having_W + 0.5))
    slack_N = _K1 * (1 - _B + _B * lengths_N / mean_length)
    return np.asarray((idf_W[:, None] * counts_WN * (_K1 + 1) / (counts_WN + slack_N)).sum(axis=0))
