"""Responses to numbers: rules, trained reward models, and the user's own functions, alone or together."""

from kleash.rewards.call import Reward, Scores, call_reward, reward_name, score_texts
from kleash.rewards.combine import CombinedReward
from kleash.rewards.language import Language
from kleash.rewards.load import load_reward
from kleash.rewards.rules import Boxed, ExactMatch, Length, Number, Regex, Tags
from kleash.rewards.trained import ModelReward
from kleash.rewards.verified import Gym, Math

__all__ = [
    "Boxed",
    "CombinedReward",
    "ExactMatch",
    "Gym",
    "Language",
    "Length",
    "Math",
    "ModelReward",
    "Number",
    "Regex",
    "Reward",
    "Scores",
    "Tags",
    "call_reward",
    "load_reward",
    "reward_name",
    "score_texts",
]
