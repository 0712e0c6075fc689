"""torchvision beside a build of torch that its compiled operators were not made for.

The usual wheel of torchvision holds operators for CUDA builds of torch. Beside a CPU build they do not load,
and then `import torchvision` stops, and with it every model of transformers and vLLM that reads pictures,
although torchvision's transforms need none of the operators. Declared by name they satisfy the import; a
call of one is still an error.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__all__ = ["declare_before_torchvision"]

OPERATORS = (
    "_deform_conv2d_backward",
    "_ps_roi_align_backward",
    "_ps_roi_pool_backward",
    "_roi_align_backward",
    "_roi_pool_backward",
    "deform_conv2d",
    "nms",
    "ps_roi_align",
    "ps_roi_pool",
    "qnms",
    "qroi_align",
    "roi_align",
    "roi_pool",
)
"""What torchvision gives rules for at import, so that it must be known by then."""


class _Declaring(MetaPathFinder):
    """Finds nothing; looks after the operators just before torchvision is first imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec("torchvision")
            if spec is not None and spec.origin is not None:
                _declare_missing(Path(spec.origin).parent)
        return None


def declare_before_torchvision() -> None:
    """Have torchvision's operators declared, where they do not load, as soon as something imports it."""
    if "torchvision" not in sys.modules and not any(isinstance(f, _Declaring) for f in sys.meta_path):
        sys.meta_path.insert(0, _Declaring())


def _declare_missing(package: Path) -> None:
    import torch

    library = next(package.glob("_C*.so"), None)
    if library is not None:
        try:
            torch.ops.load_library(str(library))
        except OSError:
            pass
        else:
            return
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        fragment.define(f"{name}(...) -> Tensor")
    _KEPT.append(fragment)


_KEPT: list[object] = []
"""Operators are forgotten with the object that declared them."""
