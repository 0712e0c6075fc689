"""Rewards: samples in, one score per component out, NaN where a sample could not be scored."""

from __future__ import annotations

from unirl.rewards.embeddings import EmbeddingSimilarity
from unirl.rewards.ensemble import Ensemble, Member
from unirl.rewards.from_store import train_from_store
from unirl.rewards.judge import Verdict, VlmJudge
from unirl.rewards.load import load_reward
from unirl.rewards.mining import mine_pairs
from unirl.rewards.ocr import PictureText
from unirl.rewards.pairs import LabelledPictures, caption_pairs, joined
from unirl.rewards.picture_statistics import PictureStatistic
from unirl.rewards.preference import Preference
from unirl.rewards.preference_pairs import PreferencePair, label_pairs, read_pairs, write_pairs
from unirl.rewards.question import Question
from unirl.rewards.rules import ExactMatch, Format, Length, Pattern
from unirl.rewards.toy_vlm import VLLM_TOY, VlmConfig
from unirl.rewards.train import RewardReport, train_yes_no
from unirl.rewards.train_preference import PreferenceReport, train_preference
from unirl.rewards.user import UserReward
from unirl.rewards.vlm import VlmYesNo

__all__ = [
    "VLLM_TOY",
    "EmbeddingSimilarity",
    "Ensemble",
    "ExactMatch",
    "Format",
    "LabelledPictures",
    "Length",
    "Member",
    "Pattern",
    "PictureStatistic",
    "PictureText",
    "Preference",
    "PreferencePair",
    "PreferenceReport",
    "Question",
    "RewardReport",
    "UserReward",
    "Verdict",
    "VlmConfig",
    "VlmJudge",
    "VlmYesNo",
    "caption_pairs",
    "joined",
    "label_pairs",
    "load_reward",
    "mine_pairs",
    "read_pairs",
    "train_from_store",
    "train_preference",
    "train_yes_no",
    "write_pairs",
]
