"""Bad samples of an epoch: left out, counted by reason, and held against the budgets of the stages."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict

from datapipe.draft import BadSample, Draft, UnevenError
from datapipe.errors import DataError, SampleError
from datapipe.stages import Pipeline
from storage import StorageError

__all__ = ["BadSampleBudget"]

logger = logging.getLogger("unirl.datapipe")


class BadSampleBudget:
    """Takes batches in the order of the epoch, so that threads do not decide what is raised."""

    def __init__(self, pipeline: Pipeline, by_reason: Counter[str]) -> None:
        """Args:
        pipeline: Its stages say how many samples each may lose.
        by_reason: To be added to.
        """
        self._allowed = {stage.name: stage.max_failures for stage in pipeline.stages}
        self._by_reason = by_reason
        # Texts and not the errors, whose frames hold the memory of their batches.
        self._lost: dict[str, list[str]] = defaultdict(list)
        self._reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def check(self, draft: Draft) -> None:
        """Count the bad samples of a batch.

        Raises:
            SampleError: When a stage loses more than it may; names all that it lost. An error of a user's
                function in a stage that may lose none comes as it is, with a note.
        """
        for _, bad in sorted(draft.bad.items()):
            lost, allowed = self._lost[bad.stage], self._allowed[bad.stage]
            lost.append(str(bad))
            self._by_reason[bad.reason] += 1
            self._reasons[bad.stage][bad.reason] += 1
            if isinstance(bad.error, UnevenError) or allowed == 0:
                raise _alone(bad)
            if len(lost) > allowed:
                raise _together(bad, lost, self._reasons[bad.stage], allowed)
            logger.warning(
                "stage %r: left out, bad sample %d of %d allowed: %s", bad.stage, len(lost), allowed, lost[-1]
            )


def _alone(bad: BadSample) -> Exception:
    # A StopIteration would be taken for the end of the epoch's iterator.
    if isinstance(bad.error, (DataError, StorageError, OSError, StopIteration)):
        error = SampleError(str(bad))
        error.__cause__ = bad.error
        return error
    bad.error.add_note(f"stage {bad.stage!r}, sample {bad.key!r} (row {bad.row})")
    return bad.error


def _together(last: BadSample, lost: list[str], reasons: Counter[str], allowed: int) -> SampleError:
    counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    error = SampleError(
        f"stage {last.stage!r}: {len(lost)} bad samples, {allowed} may be left out; by reason: {counts}; "
        + "; ".join(lost)
        + f"; mend or leave out these rows, or raise max_failures of the stage {last.stage!r}"
    )
    error.__cause__ = last.error
    return error
