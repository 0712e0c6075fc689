"""What a token engine is asked and what it answers: token ids in, token ids out, never text.

The same records travel inside one process and, as JSON, to a server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import index
from typing import Any, Protocol

from torch import Tensor

from unirl.errors import RolloutError

__all__ = [
    "SHARED_MEMORY",
    "AllowedIds",
    "Checksums",
    "EngineInfo",
    "TokenAnswer",
    "TokenEngine",
    "TokenRequest",
    "WeightBucket",
]

Span = tuple[int, int]

_ROUNDING = 0.01
"""Log-probs of narrow dtypes may come out that far above 0."""
SHARED_MEMORY = "unirl_shared_memory"
"""Name of our own weight transfer among vLLM's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedIds:
    """Which ids a response may hold at each place, compactly."""

    masks: tuple[tuple[Span, ...], ...]
    """K different sets of ids, each as spans [first, behind)."""
    places: tuple[int, ...] = ()
    """For each of T places the set that holds there; empty if set 0 holds everywhere."""

    @classmethod
    def from_masks(cls, masks: Tensor, places: Tensor) -> AllowedIds:
        """Take bool (K, V) masks and int64 (T,) or (0,) places, as `Grammar` has them."""
        return cls(
            masks=tuple(_spans(mask) for mask in masks.tolist()),
            places=tuple(int(p) for p in places.tolist()),
        )

    def at(self, place: int) -> tuple[Span, ...]:
        """Spans that hold at a place, counted from 0."""
        return self.masks[self.places[place] if self.places else 0]

    def allows(self, place: int, token: int) -> bool:
        """Whether a token may stand at a place."""
        return any(first <= token < behind for first, behind in self.at(place))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """G samples for each of P prompts, as tokens. Row b belongs to prompt b // G."""

    prompts: tuple[tuple[int, ...], ...]
    """P token lists."""
    unconditional: tuple[tuple[int, ...], ...] = ()
    """P token lists that guidance contrasts with; empty when guidance is 1."""
    seeds: tuple[int, ...]
    """B, one for each sample, in [0, 2**63)."""
    max_new_tokens: int
    """T."""
    temperature: float
    guidance: float
    allowed: AllowedIds
    end_id: int | None
    """The token that ends a response and is part of it; None for pictures, which have exactly T tokens."""
    written: tuple[tuple[int, ...], ...] = ()
    """B lists of tokens that the responses begin with, of samples that go on; empty if all begin."""
    limits: tuple[int, ...] = ()
    """B, tokens that each row gets at most this time; empty for T."""

    @property
    def group_size(self) -> int:
        """G."""
        return len(self.seeds) // len(self.prompts)

    def begun(self, row: int) -> tuple[int, ...]:
        """Tokens that a row's response begins with."""
        return self.written[row] if self.written else ()

    def limit(self, row: int) -> int:
        """Tokens that a row gets at most."""
        return self.limits[row] if self.limits else self.max_new_tokens

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TokenRequest:
        """Read what `to_json` made."""
        allowed = values["allowed"]
        return cls(
            prompts=tuple(tuple(row) for row in values["prompts"]),
            unconditional=tuple(tuple(row) for row in values["unconditional"]),
            seeds=tuple(values["seeds"]),
            max_new_tokens=values["max_new_tokens"],
            temperature=values["temperature"],
            guidance=values["guidance"],
            allowed=AllowedIds(
                masks=tuple(tuple((s[0], s[1]) for s in mask) for mask in allowed["masks"]),
                places=tuple(allowed["places"]),
            ),
            end_id=values["end_id"],
            written=tuple(tuple(row) for row in values["written"]),
            limits=tuple(values["limits"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnswer:
    """B responses, or what was added to them."""

    ids: tuple[tuple[int, ...], ...]
    """B lists of new tokens, up to the limit of their row."""
    logprobs: tuple[tuple[float, ...], ...]
    """Of the same tokens, nats, under the distribution that they were drawn from."""
    policy_version: int
    """Of the weights that drew them."""

    def check(self, request: TokenRequest) -> None:
        """Refuse an answer that is not what was asked for.

        Raises:
            RolloutError: With the row: a wrong number of rows or of image tokens, a token outside the
                grammar, a token behind the end.
        """
        if not len(self.ids) == len(self.logprobs) == len(request.seeds):
            raise RolloutError(f"the engine answered {len(self.ids)} rows for {len(request.seeds)} samples")
        for row, (ids, logprobs) in enumerate(zip(self.ids, self.logprobs, strict=True)):
            found, wanted, start = len(ids), request.limit(row), len(request.begun(row))
            if len(logprobs) != found:
                raise RolloutError(f"row {row}: {found} tokens with {len(logprobs)} log-probs")
            if not all(map(math.isfinite, logprobs)):
                raise RolloutError(
                    f"row {row}: log-probs {logprobs[:4]} are not all finite, so the logits are not; the "
                    "weights have NaN or infinite values, or the dtype is too narrow: go back to the last "
                    "good checkpoint, with a lower learning rate, or take bfloat16 instead of float16"
                )
            if max(logprobs, default=0.0) > _ROUNDING:
                raise RolloutError(
                    f"row {row}: a log-prob is {max(logprobs):g}, above 0; that is none of a distribution"
                )
            for place, token in enumerate(ids, start):
                if place >= start + wanted or not request.allowed.allows(place, token):
                    allowed = request.allowed.at(min(place, start + wanted - 1))
                    raise RolloutError(
                        f"row {row}, token {place}: the engine drew id {token}, which the grammar does not "
                        f"allow there; allowed are the ids in {allowed}"
                    )
            if request.end_id is None and found != wanted:
                image_tokens = f"{wanted} more image tokens" if start else f"{wanted} image tokens"
                raise RolloutError(f"row {row}: a picture has {image_tokens}, the engine drew {found}")
            if request.end_id is not None:
                ends = [place for place, token in enumerate(ids) if token == request.end_id]
                if (ends or [wanted - 1]) != [found - 1]:
                    raise RolloutError(
                        f"row {row}: {found} tokens with end tokens at {ends}; a response ends with its "
                        f"first end token ({request.end_id}) or after {wanted} tokens"
                    )

    def to_json(self) -> dict[str, Any]:
        """As plain values; a float survives JSON unchanged."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TokenAnswer:
        """Read what `to_json` made.

        Raises:
            TypeError: If ids are not whole, or log-probs no numbers.
        """
        return cls(
            ids=tuple(tuple(index(token) for token in row) for row in values["ids"]),
            logprobs=tuple(tuple(_number(logprob) for logprob in row) for row in values["logprobs"]),
            policy_version=index(values["policy_version"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a trainer must know of an engine before it sends weights."""

    endpoint: str
    """Where it is: a URL, or "in process"."""
    dtype: str
    """Of the weights, such as "float32"."""
    checksum: str
    """How it computes checksums, a key of `weight_sync_checksums.CHECKSUMS`."""
    policy_version: int
    """Of its weights; -1 before the first sync."""
    transfer: str = SHARED_MEMORY
    """Name of the weight transfer that its workers were started with."""
    update: str = ""
    """Which update brought its weights, by a name that a server gives, since two trainers may be at one
    version. Empty in process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some weights on their way to an engine."""

    weights: Sequence[tuple[str, Tensor]]
    """Names as in a checkpoint of transformers; whole, contiguous tensors in the engine's dtype."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """Of one tensor on its way, hexadecimal."""

    sent: str
    """Of what the trainer has."""
    held: str
    """Of what the engine computes with from now on."""


class TokenEngine(Protocol):
    """An engine as the trainer sees it, in this process or behind a URL."""

    info: EngineInfo

    def generate(self, request: TokenRequest, *, step: int) -> TokenAnswer:
        """Serve a request. The step is named in errors."""
        ...

    def begin_update(self, *, step: int) -> None:
        """Get ready for new weights; nothing is generated until `finish_update`."""
        ...

    def put(self, bucket: WeightBucket, *, step: int) -> Mapping[str, Checksums]:
        """Load some weights; return the checksums of each tensor on both sides, by name."""
        ...

    def backend(self, method: str, values: Mapping[str, Any], *, step: int) -> None:
        """Call a method of vLLM's own weight transfers in the engine's worker."""
        ...

    def learn(self, shapes: Mapping[str, tuple[int, ...]], *, step: int) -> None:
        """Find out where tensors of these names and shapes end up. Overwrites the weights."""
        ...

    def checksums(self, *, step: int) -> Mapping[str, str]:
        """Of all tensors as the engine holds them, by name."""
        ...

    def finish_update(self, version: int) -> None:
        """Check that nothing is left over on either side, drop every cache, take the version."""
        ...

    def close(self) -> None:
        """Give everything back; it is not used again."""
        ...


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _spans(mask: Sequence[bool]) -> tuple[Span, ...]:
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return tuple((edges[i], edges[i + 1]) for i in range(0, len(edges), 2))
