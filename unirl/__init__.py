"""UniRL: post-training for models that read and write text and images."""

__version__ = "0.1.0"
