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
        self._bad: dict[str, list[BadSample]] = defaultdict(list)

    def check(self, draft: Draft) -> None:
        """Count the bad samples of a batch.

        Raises:
            SampleError: When a stage loses more than it may; names all that it lost. An error of a user's
                function in a stage that may lose none comes as it is, with a note.
        """
        for _, bad in sorted(draft.bad.items()):
            self._by_reason[bad.reason] += 1
            lost, allowed = self._bad[bad.stage], self._allowed[bad.stage]
            lost.append(bad)
            if isinstance(bad.error, UnevenError) or (len(lost) > allowed == 0):
                raise _alone(bad)
            if len(lost) > allowed:
                raise _together(bad.stage, lost, allowed)
            logger.warning(
                "stage %r: %s is left out, bad sample %d of %d allowed", bad.stage, bad, len(lost), allowed
            )


def _alone(bad: BadSample) -> Exception:
    if isinstance(bad.error, (DataError, StorageError, OSError)):
        error = SampleError(str(bad))
        error.__cause__ = bad.error
        return error
    bad.error.add_note(f"stage {bad.stage!r}, sample {bad.key!r} (row {bad.row})")
    return bad.error


def _together(stage: str, lost: list[BadSample], allowed: int) -> SampleError:
    reasons = Counter(bad.reason for bad in lost)
    counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    error = SampleError(
        f"stage {stage!r}: {len(lost)} bad samples, {allowed} may be left out; by reason: {counts}; "
        + "; ".join(map(str, lost))
        + f"; mend or leave out these rows, or raise max_failures of the stage {stage!r}"
    )
    error.__cause__ = lost[-1].error
    return error
