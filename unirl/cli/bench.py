"""`unirl bench loader`: how fast a store gives batches on this machine, and what holds it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from unirl.cli.output import AsJson, StorePath, tell

if TYPE_CHECKING:
    from datapipe.loader_stats import LoaderStats
    from datapipe.stages import Executor

__all__ = ["COMMANDS", "loader"]


def loader(
    store: StorePath,
    query: Annotated[str | None, typer.Option(help="Rows to read, as in select; default all.")] = None,
    side: Annotated[
        int, typer.Option(min=0, help="Decode pictures to side x side pixels; 0 leaves out.")
    ] = 224,
    tensor: Annotated[list[str] | None, typer.Option(help="Tensor column to read; may be repeated.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 64,
    batches: Annotated[
        int, typer.Option(min=1, help="Batches to read, over as many epochs as needed.")
    ] = 100,
    threads: Annotated[int, typer.Option(min=1, help="Threads that fetch and decode.")] = 2,
    raw: Annotated[bool, typer.Option("--raw", help="Leave pixels as bytes instead of floats.")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="Decode in processes.")] = False,
    max_bad: Annotated[int, typer.Option(min=0, help="Bad samples that a stage may leave out.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Read batches as fast as they come, and print where the time went.

    Example: unirl bench loader data/store --query "modality = 'image'" --threads 4
    """
    from datapipe import ImageField, Loader, StageOptions
    from storage import FeatureStore

    stages = {"fetch": StageOptions(max_failures=max_bad)}
    if side:
        executor: Executor = "process" if processes else "thread"
        stages["decode"] = StageOptions(executor=executor, max_failures=max_bad)
    made = Loader(
        FeatureStore.open(store).select(query),
        batch_size=batch_size,
        image=ImageField(size=(side, side), pixels="uint8" if raw else "float32") if side else None,
        tensors=tensor or [],
        columns=(),
        drop_last=False,
        num_threads=threads,
        stages=stages,
    )
    for _, _ in zip(range(batches), made.forever()):
        pass
    made.close()
    stats = made.stats()
    tell(stats.to_dict(), _table(stats), as_json)


COMMANDS: Final[dict[str, Callable[..., None]]] = {"loader": loader}


def _table(stats: LoaderStats) -> str:
    lines = [
        f"{stats.samples} samples in {stats.elapsed_s:.2f} s: {stats.samples_per_s:.0f} samples/s, "
        f"{stats.bytes_read} bytes read, {stats.bytes_copied} copied",
        f"{'stage':<10} {'workers':>7} {'items':>7} {'ms/item':>8} {'busy':>6} {'idle':>6} {'blocked':>7} "
        f"{'queue':>6}",
    ]
    for stage in stats.stages:
        total = max(stage.busy_s + stage.idle_s + stage.blocked_s, 1e-9)
        lines.append(
            f"{stage.name:<10} {stage.workers:>7} {stage.items:>7} "
            f"{1000 * stage.busy_s / max(1, stage.items):>8.2f} {stage.busy_fraction:>6.0%} "
            f"{stage.idle_s / total:>6.0%} {stage.blocked_s / total:>7.0%} {stage.mean_queue:>6.1f}"
        )
    if stats.bad:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(stats.bad.items()))
        lines.append(f"bad: {stats.bad_fraction:.2%} of the samples: {reasons}")
    lines.append(f"bottleneck: {stats.bottleneck}")
    return "\n".join(lines)
