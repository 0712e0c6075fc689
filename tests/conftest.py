"""Settings for every test: no hub, no display, one thread a process, so that two workers fit two cores."""

from __future__ import annotations

import os

from hypothesis import settings

import unirl  # noqa: F401  (declares torchvision's operators before a test imports transformers)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

# A deadline would measure how busy the machine is; one seed for everyone makes a failure repeatable.
settings.register_profile("unirl", deadline=None, derandomize=True)
settings.load_profile("unirl")
