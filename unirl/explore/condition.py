"""Conditions over columns whose names SQL would read as arithmetic, such as `reward/vlm`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator

__all__ = ["nearest_column", "quote_columns", "quote_name", "quote_text"]

_VERBATIM = re.compile(
    r"""
      (?<!\w)[eE]'(?:[^'\\]|\\.|'')*(?:'|\Z)  # string with backslash escapes
    | '(?:[^']|'')*(?:'|\Z)                   # string
    | "(?:[^"]|"")*(?:"|\Z)                   # identifier that is quoted already
    | \$(\w*)\$.*?(?:\$\1\$|\Z)               # dollar-quoted string
    | --[^\n]*                                # comment to the end of the line
    | /\*.*?(?:\*/|\Z)                        # block comment
    """,
    re.VERBOSE | re.DOTALL,
)
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*")


def quote_name(name: str) -> str:
    """Return `name` as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Return `text` as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def quote_columns(sql: str, columns: Collection[str]) -> str:
    """Quote the columns in `sql` whose names are not plain identifiers.

    `reward/vlm < 0.2` becomes `"reward/vlm" < 0.2` when `reward/vlm` is a column. The longest column that
    fits wins, letter case is ignored as in SQL, and a division is kept by writing spaces around its slash.
    Strings, quoted identifiers and comments stay as they are.

    Args:
        sql: Any piece of SQL.
        columns: The names that exist; those that are plain identifiers need no quotes and are left alone.
    """
    special = sorted((name for name in columns if not _PLAIN_NAME.fullmatch(name)), key=len, reverse=True)
    if not special:
        return sql
    actual = {name.lower(): name for name in special}
    alternatives = "|".join(re.escape(name) for name in special)
    names = re.compile(rf"(?<![\w$])(?:{alternatives})(?![\w$])", re.IGNORECASE)

    def quoted(match: re.Match[str]) -> str:
        return quote_name(actual[match.group().lower()])

    return "".join(text if verbatim else names.sub(quoted, text) for verbatim, text in _pieces(sql))


def nearest_column(sql: str, columns: Collection[str]) -> str | None:
    """Return the column that the first unknown name in `sql` was probably meant to be, if any is close."""
    known = {name.lower() for name in columns}
    for verbatim, text in _pieces(sql):
        if verbatim:
            continue
        for word in re.findall(r"[A-Za-z_][\w/]*", text):
            if word.lower() in known:
                continue
            close = difflib.get_close_matches(word.lower(), sorted(known), n=1, cutoff=0.7)
            if close:
                return next(name for name in columns if name.lower() == close[0])
    return None


def _pieces(sql: str) -> Iterator[tuple[bool, str]]:
    """Split into (is_verbatim, text); the texts joined are `sql` again."""
    end = 0
    for match in _VERBATIM.finditer(sql):
        yield False, sql[end : match.start()]
        yield True, match.group()
        end = match.end()
    yield False, sql[end:]
