"""Lets torchvision be imported beside a build of torch for which its compiled operators were not made.

It registers shapes for these operators at import, and so must find their names; nothing here calls them.
"""

from __future__ import annotations

import torch

_NAMES = ["nms", "qnms", "_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward"]
_NAMES += ["_ps_roi_pool_backward", "_deform_conv2d_backward", "roi_align", "roi_pool", "ps_roi_align"]
_NAMES += ["ps_roi_pool", "deform_conv2d"]

_library = torch.library.Library("torchvision", "FRAGMENT")
for _name in _NAMES:
    if not hasattr(torch.ops.torchvision, _name):
        _library.define(f"{_name}(Tensor input) -> Tensor")
