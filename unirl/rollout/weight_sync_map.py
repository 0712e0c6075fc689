"""Where each tensor of a checkpoint ends up in an engine's model, learnt by watching its own loader once.

An engine fuses, pads and shares weights as it likes. Its loader, `model.load_weights`, knows how; its copies
are recorded, and from then on the same copies are made directly and checked. Whatever the recording does not
account for, on either side, is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.errors import RolloutError
from unirl.rollout.vllm_requests import Checksums
from unirl.rollout.weight_sync_checksums import checksum, checksum_kind, copy_checked

__all__ = ["EngineWeights"]

_OTHER_MODEL = (
    "the engine was started for another model, or another trainer's came before: start it from this policy's "
    "config.json"
)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy that the loader makes: part of a tensor, as strides, into a place of a parameter."""

    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class EngineWeights:
    """Puts a trainer's tensors into an engine's model and says what the model holds afterwards.

    Args:
        model: Anything with vLLM's `load_weights(iterable of (name, tensor))`, whose parameters are what it
            computes with.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[str, list[_Copy]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._owners: dict[tuple[int, int, int], str] = {}
        self._filled: dict[int, set[tuple[int, int]]] = {}
        """By the address of a parameter's storage: offsets and lengths that something was written to."""
        self._seen: set[str] = set()

    def begin(self) -> None:
        """Start a new update."""
        self._seen.clear()

    def put(self, weights: Sequence[tuple[str, Tensor]]) -> dict[str, Checksums]:
        """Load whole tensors, in the model's dtype and on its device.

        Returns:
            The checksums of each: of what came and of what the model holds now. The second name of a shared
            matrix is not copied again, only compared.

        Raises:
            RolloutError: If the model's loader does not take one of them.
        """
        self._learn([(name, tensor) for name, tensor in weights if name not in self._copies])
        self._seen.update(name for name, _ in weights)
        return {name: self._load(name, tensor) for name, tensor in weights}

    def learn(
        self, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Find out where tensors end up before they come another way. The model's weights are overwritten.

        What was known before is forgotten.
        """
        for known in (self._copies, self._shapes, self._owners, self._filled):
            known.clear()
        for name, shape in shapes.items():
            self._learn([(name, torch.zeros(shape, dtype=dtype, device=device))])
        self._seen.update(shapes)

    def checksums(self) -> dict[str, str]:
        """Of every known tensor as the model holds it."""
        return {
            name: checksum(_held(copies), checksum_kind(copies[0].target.device))
            for name, copies in self._copies.items()
        }

    def finish(self) -> None:
        """Require that every tensor that was ever sent came, and that it filled the whole model.

        Raises:
            RolloutError: With the names that are left over.
        """
        missing = sorted(self._copies.keys() - self._seen)
        if missing:
            raise RolloutError(
                f"weight sync: the trainer did not send {_listed(missing)} this time; {_OTHER_MODEL}"
            )
        empty = sorted(
            f"{name} ({filled} of {parameter.numel()} values)"
            for name, parameter in self._model.named_parameters()
            if (filled := self._num_filled(parameter)) != parameter.numel()
        )
        if empty:
            raise RolloutError(
                f"weight sync: nothing that the trainer sent fills {_listed(empty)} of the engine's model; "
                "an output head that is stored nowhere is the usual case: send it, or tie it"
            )

    def _num_filled(self, parameter: Tensor) -> int:
        spans = self._filled.get(parameter.untyped_storage().data_ptr(), set())
        first = parameter.storage_offset()
        return sum(length for start, length in spans if first <= start < first + parameter.numel())

    def _load(self, name: str, tensor: Tensor) -> Checksums:
        kind = checksum_kind(tensor.device)
        copies, shape = self._copies[name], self._shapes[name]
        if tensor.shape != shape:
            raise RolloutError(
                f"weight sync: {name} is {tuple(tensor.shape)}, the engine's model has {shape} there; "
                f"{_OTHER_MODEL}"
            )
        place = copies[0].target
        is_owner = self._owners[_key(place)] == name
        if len(copies) == 1 and place.is_contiguous() and copies[0].stride == _row_major(copies[0].size):
            if is_owner:
                sent, held = copy_checked(place.view(-1), tensor.reshape(-1), kind)
                return Checksums(sent=sent, held=held)
            return Checksums(sent=checksum(tensor, kind), held=checksum(place, kind))
        for copy in copies if is_owner else ():
            copy.target.copy_(tensor.as_strided(copy.size, copy.stride, copy.offset))
        return Checksums(sent=checksum(tensor, kind), held=checksum(_held(copies), kind))

    def _learn(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        if not weights:
            return
        # A storage of its own for each, so that a copy's source says which tensor it belongs to.
        clones = [(name, tensor.clone(memory_format=torch.contiguous_format)) for name, tensor in weights]
        with torch.no_grad(), _Recorder(dict(clones)) as recorder:
            self._load_weights(clones)
        for name, tensor in sorted(clones, key=lambda pair: pair[0] not in recorder.copies):
            copies = recorder.copies.get(name) or self._twin(tensor)
            copied = sum(copy.target.numel() for copy in copies)
            if copied != tensor.numel():
                raise RolloutError(
                    f"weight sync: the engine's loader copied {copied} of the {tensor.numel()} values of "
                    f"{name}, so that tensor cannot be followed; send the names that a checkpoint of "
                    "transformers has, in the engine's dtype"
                )
            self._copies[name], self._shapes[name] = copies, tuple(tensor.shape)
            for copy in copies:
                self._owners.setdefault(_key(copy.target), name)
        for place in recorder.written:
            storage, start, length = _key(place)
            self._filled.setdefault(storage, set()).add((start, length))

    def _load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Let the engine's own loader have them, one after the other, so that one it refuses is known."""
        last: list[str] = []

        def named() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                last[:] = [f"{name} {tuple(tensor.shape)}"]
                yield name, tensor

        try:
            self._model.load_weights(named())  # type: ignore[operator]
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise RolloutError(
                f"weight sync: the engine's loader stopped at {_listed(last)}: {type(error).__name__}: "
                f"{error}; {_OTHER_MODEL}"
            ) from error

    def _twin(self, tensor: Tensor) -> list[_Copy]:
        """Copies of a tensor that has the same bytes, for a name that the loader leaves out: a tied head."""
        for copies in self._copies.values():
            place = copies[0].target
            if place.shape == tensor.shape and torch.equal(place, tensor):
                return copies
        return []


class _Recorder(TorchDispatchMode):
    """Sees every copy whose source is one of the given tensors, and every place that is written to."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}
        self.copies: dict[str, list[_Copy]] = {}
        self.written: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            name = self._names.get(source.untyped_storage().data_ptr())
            if name is not None:
                shape = tuple(source.size()), tuple(source.stride()), source.storage_offset()
                self.copies.setdefault(name, []).append(_Copy(target.detach(), *shape))
                self.written.append(target.detach())
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default) and args[0].numel():
            self.written.append(args[0].detach())
        return func(*args, **(kwargs or {}))


def _held(copies: Sequence[_Copy]) -> Tensor:
    """The tensor that was copied, put together from where it went, in its own order."""
    place = copies[0].target
    held = place.new_empty(sum(copy.target.numel() for copy in copies))
    for copy in copies:
        held.as_strided(copy.size, copy.stride, copy.offset).copy_(copy.target)
    return held


def _key(place: Tensor) -> tuple[int, int, int]:
    return place.untyped_storage().data_ptr(), int(place.storage_offset()), place.numel()


def _row_major(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
