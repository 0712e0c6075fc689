"""What nothing trains, such as the model below LoRA adapters: written once for all checkpoints of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from unirl.trainer.checkpoint import FROZEN
from unirl.trainer.host_copy import Fingerprint, HostCopy

__all__ = ["FrozenPart", "is_frozen"]


def is_frozen(tensor: Tensor) -> bool:
    """Whether a tensor of a model is a parameter that takes no gradient."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


class FrozenPart:
    """This rank's frozen tensors, as a file that is called what the checksum of its content is."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._copy: HostCopy | None = None
        self._files: dict[str, Fingerprint] = {}

    def take(
        self, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str], directories: Sequence[Path]
    ) -> None:
        """Copy the tensors, unless a file of what they are now is in every directory.

        Args:
            tensors: What this rank holds of them.
            metadata: See `HostCopy.take`.
            directories: Of checkpoints.
        """
        # Torch counts the changes of a tensor in place.
        seen = {name: (t.data_ptr(), t.numel(), t._version) for name, t in tensors.items()}
        if seen == self._seen and not any(self.missing_bytes(directory) for directory in directories):
            return
        self._seen, self._files, self._copy = seen, {}, None
        if tensors:
            self._copy = HostCopy()
            self._copy.take(tensors, metadata=metadata)
            fingerprint = self._copy.fingerprint()
            self._files = {f"{fingerprint['xxh3_128']}.safetensors": fingerprint}

    def missing_bytes(self, directory: Path) -> int:
        """What `write` would write there."""
        return sum(
            int(wanted["bytes"])
            for name, wanted in self._files.items()
            if not _is_there(directory / FROZEN / name, wanted)
        )

    def write(self, directory: Path) -> dict[str, Fingerprint]:
        """Write the file if the directory lacks it; returns its name and what it must be.

        Raises:
            OSError: If it cannot be written.
        """
        for name, wanted in self._files.items():
            path = directory / FROZEN / name
            if self._copy is not None and not _is_there(path, wanted):
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f".{name}.{os.getpid()}.partial")
                self._copy.write(partial)
                partial.rename(path)
        return self._files

    def release(self) -> None:
        """Let go of the copy: it is written."""
        self._copy = None


def _is_there(path: Path, wanted: Fingerprint) -> bool:
    return path.is_file() and path.stat().st_size == wanted["bytes"]
