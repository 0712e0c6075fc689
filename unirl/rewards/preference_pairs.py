"""Pairs of samples of one prompt, and which of the two somebody prefers.

On disk a pair is one line of JSON with the two pictures as files beside it, so that a person with an editor,
or a program of any kind, can label it: `"label": "first"`, `"second"` or `"tie"`; null where nobody has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from datapipe.decode import decode_image
from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.types import Reward, Sample

__all__ = ["LABELS", "PAIRS_FILE", "Label", "PreferencePair", "label_pairs", "read_pairs", "write_pairs"]

Label = Literal["first", "second", "tie"]
LABELS = ("first", "second", "tie")
PAIRS_FILE = "pairs.jsonl"
PICTURES = "pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two samples that answer one prompt."""

    pair: str
    """Name of the pair, unique in its file."""
    first: Sample
    second: Sample
    label: Label | None = None
    """Which is better; None: nobody has said."""
    why: str = ""
    """Why the pair was picked."""
    scores: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """What rewards and judge said of (first, second), by name. For the record; not shown to who labels."""

    @property
    def prompt(self) -> str:
        """Key of the prompt: pairs of one prompt are never split between training and held-out pairs."""
        return self.first.key


def write_pairs(pairs: Sequence[PreferencePair], folder: Path) -> Path:
    """Write `pairs.jsonl` and the pictures, as PNG, under a folder; return the path of the first."""
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    lines = []
    for number, pair in enumerate(pairs):
        sides: dict[str, Any] = {}
        for name, sample in (("first", pair.first), ("second", pair.second)):
            picture = f"{PICTURES}/{number:05d}-{name}.png"
            Image.fromarray(sample.image).save(folder / picture)
            sides[name] = {"image": picture, "caption": sample.caption}
        lines.append(
            {
                "pair": pair.pair,
                "label": pair.label,
                "prompt": pair.prompt,
                "direction": pair.first.direction,
                "target": pair.first.target,
                **sides,
                "why": pair.why,
                "scores": {name: list(values) for name, values in pair.scores.items()},
            }
        )
    path = folder / PAIRS_FILE
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def read_pairs(
    source: str | Path, *, labels: str | Path | None = None, where: str | None = None
) -> list[PreferencePair]:
    """Read pairs from a file, its folder, or a feature store.

    A store holds two rows for a pair, with pictures and the columns `pair` (its name), `caption` and
    `preferred` (boolean).

    Args:
        source: `pairs.jsonl`, the folder that holds it, or a feature store.
        labels: Another file of lines `{"pair": name, "label": "first"}`, which overrule those of the pairs.
        where: SQL condition over a store.

    Raises:
        ConfigError: If a line, a label or a picture is not what it should be, with its place.
    """
    path = Path(source)
    if (path / "snapshots").is_dir():
        pairs = _from_store(path, where)
    else:
        path = path / PAIRS_FILE if path.is_dir() else path
        pairs = [_pair(line, path, number) for number, line in _lines(path)]
    if labels is None:
        return pairs
    said = {
        str(line.get("pair")): _label(line, Path(labels), number) for number, line in _lines(Path(labels))
    }
    unknown = sorted(said.keys() - {pair.pair for pair in pairs})
    if unknown:
        raise ConfigError(f"{labels}: labels of {len(unknown)} pairs that are not in {source}: {unknown[0]}")
    return [replace(pair, label=said.get(pair.pair, pair.label)) for pair in pairs]


def label_pairs(
    pairs: Sequence[PreferencePair], reward: Reward, *, margin: float = 0.0
) -> list[PreferencePair]:
    """Let a stronger reward label pairs: the higher score wins, a tie within `margin`; None without both."""
    total = reward.score([sample for pair in pairs for sample in (pair.first, pair.second)]).total
    labelled = []
    for pair, (first, second) in zip(pairs, total.reshape(-1, 2)):
        label: Label | None = None
        if not np.isnan(first - second):
            label = "tie" if abs(first - second) <= margin else "first" if first > second else "second"
        labelled.append(replace(pair, label=label))
    return labelled


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); wanted JSON lines of pairs") from None
    lines = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: no JSON ({error})") from None
        if not isinstance(line, dict) or "pair" not in line:
            raise ConfigError(f'{path}:{number}: wanted an object with "pair", found {text[:40]}')
        lines.append((number, line))
    return lines


def _label(line: Mapping[str, Any], path: Path, number: int) -> Label | None:
    label: Label | None = line.get("label")
    if label is not None and label not in LABELS:
        raise ConfigError(f'{path}:{number}: label is {label!r}, wanted "first", "second", "tie" or null')
    return label


def _pair(line: Mapping[str, Any], path: Path, number: int) -> PreferencePair:
    try:
        first, second = (
            Sample(
                key=str(line["prompt"]),
                direction=line["direction"],
                caption=str(line[side]["caption"]),
                image=np.asarray(Image.open(path.parent / line[side]["image"]).convert("RGB")),
                target=str(line["target"]),
            )
            for side in ("first", "second")
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}:{number}: pair {line['pair']}: {error} is missing or of no use") from None
    except (OSError, UnidentifiedImageError) as error:
        raise ConfigError(f"{path}:{number}: pair {line['pair']}: no picture: {error}") from None
    return PreferencePair(
        pair=str(line["pair"]),
        first=first,
        second=second,
        label=_label(line, path, number),
        why=str(line.get("why", "")),
        scores=line.get("scores", {}),
    )


def _from_store(path: Path, where: str | None) -> list[PreferencePair]:
    store = FeatureStore.open(path)
    view = store.select(f"({where or 'true'}) and pair is not null and bytes is not null", order_by="key")
    sides: dict[str, dict[bool, Sample]] = {}
    columns = [view.column(name).to_pylist() for name in ("pair", "preferred", "caption")]
    for row, pair, preferred, caption in zip(view.rows.tolist(), *columns):
        sample = Sample(
            key=caption,
            direction="image",
            caption=caption,
            image=decode_image(store.blob(row)),
            target=caption,
        )
        sides.setdefault(str(pair), {})[bool(preferred)] = sample
    lonely = [pair for pair, found in sides.items() if len(found) != 2]
    if lonely:
        raise ConfigError(f"{path}: pair {lonely[0]} needs one row with `preferred` and one without")
    return [
        PreferencePair(pair=pair, first=found[True], second=found[False], label="first")
        for pair, found in sides.items()
    ]
