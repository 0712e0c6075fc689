"""`unirl score`: a vision-language model's opinion of a folder of pictures, the worst first."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unirl.cli.output import AsJson, counted, print_json, progress_bar, require_http, require_suffix
from unirl.cli.reward_server import TOKEN_HELP, token_of
from unirl.errors import ConfigError
from unirl.model_folder import QWEN_VL, require_model

if TYPE_CHECKING:
    import pyarrow as pa

    from storage import FeatureStore, View
    from unirl.types import Reward

__all__ = ["score"]

BATCH: Final = 32
CAPTION: Final = "{caption}"
"""As in `unirl.rewards.question`, which is slow to import."""
OUT_SUFFIXES: Final = (".parquet", ".csv", ".jsonl")


def score(
    source: Annotated[
        str,
        typer.Argument(help="A store, or pictures as `unirl ingest` takes them: a folder, a tar, a table."),
    ],
    reward: Annotated[
        Path | None, typer.Option(help="Folder of a reward model, or of any Qwen2.5-VL of transformers.")
    ] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="URL of a server of a VLM, up to /v1. May be repeated.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help=TOKEN_HELP)] = None,
    question: Annotated[
        str | None,
        typer.Option(
            help="Asked of each picture, to be answered by yes or no; {caption} stands for its own."
        ),
    ] = None,
    where: Annotated[str, typer.Option("--where", help="SQL condition: which pictures.")] = "true",
    image_size: Annotated[
        int | None, typer.Option(min=8, help="Side to which pictures are scaled; the model's own, else 448.")
    ] = None,
    worst: Annotated[int, typer.Option(min=1, help="Pictures that are printed and drawn.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write all scores: .parquet, .csv or .jsonl.")] = None,
    sheet: Annotated[Path | None, typer.Option(help="Draw the worst on a contact sheet: worst.png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score pictures with a vision-language model and look at the worst.

    The score is the probability of yes against no. Nothing is written into a store. Damaged pictures are
    named and left out.

    Example: unirl score photos/ --reward models/qwen2.5-vl --question "is this picture sharp ?"
    Example: unirl score data/store --reward models/reward --worst 50 --sheet worst.png --out scores.csv
    """
    if (reward is None) == (not endpoint):
        raise typer.BadParameter("name one of --reward FOLDER and --endpoint URL")
    from unirl.cli.contact_sheet import SHEET_SUFFIXES

    require_suffix("--out", out, OUT_SUFFIXES)
    require_suffix("--sheet", sheet, SHEET_SUFFIXES)
    require_http(endpoint or [])
    if endpoint and question is None:
        raise typer.BadParameter('with --endpoint say what to ask: --question "does this show {caption} ?"')
    made = _reward(reward, endpoint or [], token_file, question, image_size)
    with _opened(source, as_json) as store:
        is_picture = "bytes IS NOT NULL"
        if "modality" in store.columns:
            is_picture += " AND NOT starts_with(coalesce(modality, ''), 'video')"
        view = store.select(f"(\n{where}\n) AND {is_picture}")
        if not len(view):
            raise ConfigError(f"{source}: no picture where {where}")
        if (question is None or CAPTION in question) and not any(view.column("caption").to_pylist()):
            raise ConfigError(
                f"{source}: no picture has a caption to ask about; ask a question without {CAPTION}: "
                '--question "is this picture sharp ?"'
            )
        table, problems = _score(view, made, question, as_json)
        worst_rows = table.slice(0, worst)
        if sheet is not None:
            _draw(store, worst_rows, sheet)
        if out is not None:
            _write(table, out)
    _print(source, table, worst_rows, problems, out, sheet, as_json)


def _reward(
    folder: Path | None, endpoint: list[str], token_file: Path | None, asked: str | None, side: int | None
) -> Reward:
    """The model with its question; without one given, its own."""
    from unirl.rewards import Question, VlmYesNo, load_reward
    from unirl.rewards.backends.base import IMAGE_MARK
    from unirl.rewards.question import REWARD_FILE

    if folder is not None:
        require_model(folder, QWEN_VL)
    has_own = folder is not None and (folder / REWARD_FILE).is_file()
    if folder is not None and asked is None:
        if not has_own:
            raise ConfigError(f'{folder}: has no question of its own; ask one: --question "is this sharp ?"')
        return load_reward(folder)
    own = Question.load(folder) if folder is not None and has_own else None
    size = (side, side) if side else own.image_size if own else (448, 448)
    words = asked if asked is not None and CAPTION in asked else CAPTION
    template = f"{IMAGE_MARK} {words}"
    settings = Question(template=template, image_size=size, max_tokens=own.max_tokens if own else 4096)
    if folder is None:
        from unirl.rewards.backends.endpoint import EndpointBackend

        return VlmYesNo(
            EndpointBackend(endpoint, token=token_of(token_file)), settings, max_failed_fraction=1.0
        )
    import torch

    from unirl.rewards.backends.qwen import TransformersBackend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return VlmYesNo(
        TransformersBackend.load(folder, batch_size=BATCH, device=device), settings, max_failed_fraction=1.0
    )


@contextmanager
def _opened(source: str, as_json: bool) -> Iterator[FeatureStore]:
    """The store, or a passing one that the pictures are ingested into."""
    from datapipe import ingest
    from storage import FeatureStore

    if (Path(source) / "snapshots").is_dir():
        yield FeatureStore.open(source)
        return
    with tempfile.TemporaryDirectory(prefix="unirl-score-") as folder:
        report = ingest(
            [source], Path(folder) / "store", optional=["caption"], max_bad_fraction=1.0, progress=not as_json
        )
        store = FeatureStore.open(Path(folder) / "store")
        for row in store.quarantined().select(["place", "reason"]).to_pylist():
            typer.echo(f"left out: {row['place']}: {row['reason']}", err=True)
        if not report.num_added:
            raise ConfigError(f"{source}: no picture that can be read")
        yield store


def _score(view: View, reward: Reward, asked: str | None, as_json: bool) -> tuple[pa.Table, int]:
    """All scores, the worst first and those that could not be scored last; and the number of these."""
    import numpy as np
    import pyarrow as pa

    from datapipe.decode import decode_image
    from unirl.types import Sample

    keys, captions = view.keys(), view.column("caption").to_pylist()
    is_fixed = asked is not None and CAPTION not in asked
    columns: dict[str, list[np.ndarray]] = {}
    with progress_bar("scoring", as_json) as progress:
        for start in range(0, len(view), BATCH):
            places = range(start, min(start + BATCH, len(view)))
            samples = [
                Sample(
                    key=keys[place],
                    direction="image",
                    caption=str(asked) if is_fixed else captions[place] or "",
                    image=decode_image(view.store.blob(int(view.rows[place]))),
                    target=captions[place] or "",
                )
                for place in places
            ]
            scores = reward.score(samples)
            is_blank = np.array([not is_fixed and not captions[place] for place in places])
            for name, values in {"score": scores.total, **scores.components}.items():
                columns.setdefault(name, []).append(np.where(is_blank, np.nan, values))
            if progress is not None:
                progress(places.stop, len(view))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.argsort(joined["score"], kind="stable")
    table = pa.table(
        {
            "key": pa.array([keys[place] for place in order]),
            **{name: pa.array(part[order], from_pandas=True) for name, part in joined.items()},
            "caption": pa.array([captions[place] for place in order], pa.string()),
        }
    )
    return table, table["score"].null_count


def _draw(store: FeatureStore, table: pa.Table, sheet: Path) -> None:
    from unirl.cli.contact_sheet import write_sheet
    from unirl.cli.show import picture_of

    rows = table.to_pylist()
    pictures = [picture_of(store, store.row(row["key"]), "image") for row in rows]
    words = [f"{_number(row['score'])} {row['key']} {row['caption'] or ''}" for row in rows]
    write_sheet(sheet, pictures, words, columns=6, side=160)


def _write(table: pa.Table, out: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    out.parent.mkdir(parents=True, exist_ok=True)
    suffix = out.suffix.lower()
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, out)
    elif suffix == ".csv":
        pyarrow.csv.write_csv(table, out)
    else:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
        out.write_text("".join(lines), encoding="utf-8")


def _print(
    source: str,
    table: pa.Table,
    worst: pa.Table,
    problems: int,
    out: Path | None,
    sheet: Path | None,
    as_json: bool,
) -> None:
    known = table["score"].drop_null().to_numpy()
    mean = float(known.mean()) if len(known) else None
    facts: dict[str, Any] = {
        "source": source,
        "scored": len(known),
        "not_scored": problems,
        "mean": mean,
        "worst": worst.to_pylist(),
        "out": None if out is None else str(out),
        "sheet": None if sheet is None else str(sheet),
    }
    if as_json:
        print_json(facts)
        return
    shown = Table(box=None)
    for name in ("score", "key", "caption"):
        shown.add_column(name, overflow="fold")
    for row in worst.to_pylist():
        shown.add_row(_number(row["score"]), escape(row["key"]), escape(row["caption"] or ""))
    Console(highlight=False).print(shown)
    lost = f", {problems} could not be scored" if problems else ""
    typer.echo(f"{counted(len(known), 'picture')} scored, mean {_number(mean)}{lost}; the worst are above")
    for path in (out, sheet):
        if path is not None:
            typer.echo(str(path))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
