"""A reward function of one's own, and an independent judge beside it.

    kleash train reinforce data=examples/pairs.jsonl reward=examples/own_reward.py:cheerful \
        gold=examples/own_reward.py:varied

A reward takes lists of prompts and responses, and those of the rows' other columns that it names. It returns
one number a response, or None where it has no opinion: such a response is counted and left out.
"""

from __future__ import annotations

CHEERFUL = {
    "amazing", "beautiful", "best", "bright", "calm", "cheerful", "clean", "comfortable", "delicious", "fine",
    "fresh", "friendly", "fun", "funny", "glad", "good", "great", "happy", "helpful", "interesting", "kind",
    "lovely", "nice", "peaceful", "perfectly", "polite", "proud", "tasty", "warm", "wonderful",
}  # fmt: skip


def words(text: str) -> list[str]:
    """Words in lower case, without the punctuation around them."""
    return [word.strip(".,;:!?\"'()").lower() for word in text.split()]


def cheerful(prompts: list[str], responses: list[str]) -> list[float | None]:
    """How many cheerful words a response holds, repetitions included: easy to raise, and easy to fool."""
    return [_cheerful(words(text)) if text.strip() else None for text in responses]


def varied(prompts: list[str], responses: list[str]) -> list[float | None]:
    """Different cheerful words, three at most, minus the share of words that repeat an earlier one.

    It knows what `cheerful` does not: that "good good good" is no better than "good".
    """
    return [_varied(words(text)) if text.strip() else None for text in responses]


def _cheerful(found: list[str]) -> float:
    return float(sum(word in CHEERFUL for word in found))


def _varied(found: list[str]) -> float:
    different = set(found)
    return min(3, len(different & CHEERFUL)) - (len(found) - len(different)) / len(found)
