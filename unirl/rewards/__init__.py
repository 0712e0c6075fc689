"""Rewards: samples in, one score per component out, NaN where a sample could not be scored."""

from __future__ import annotations

from unirl.rewards.ensemble import WeightedSum
from unirl.rewards.from_store import train_from_store
from unirl.rewards.pairs import LabelledPictures, caption_pairs, joined
from unirl.rewards.question import Question
from unirl.rewards.rules import ExactMatch
from unirl.rewards.toy_vlm import VlmConfig
from unirl.rewards.train import RewardReport, train_yes_no
from unirl.rewards.vlm import VlmYesNo

__all__ = [
    "ExactMatch",
    "LabelledPictures",
    "Question",
    "RewardReport",
    "VlmConfig",
    "VlmYesNo",
    "WeightedSum",
    "caption_pairs",
    "joined",
    "train_from_store",
    "train_yes_no",
]
