"""UniRL: post-training for models that read and write text and images."""

from unirl.torchvision_ops import declare_before_torchvision

__version__ = "0.1.0"

declare_before_torchvision()
