"""Tokenised rows: what is left of a data set once it is nothing but ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """A demonstration: the row is prompt ids + response ids; `trained[i]` marks `response_ids[i]` a target.

    `response_ids` starts at the first trained token (with several assistant turns it also holds the user
    turns in between, untrained). `number` is the row's 1-based number in its file.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    trained: list[bool]
    number: int

    @property
    def length(self) -> int:
        """Tokens in the row."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Pair:
    """A preference: two responses to one prompt; every response token counts in a log-probability."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    number: int

    @property
    def length(self) -> int:
        """Tokens in the longer of the two rows."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


@dataclass(frozen=True)
class PromptIds:
    """A prompt to sample from: its ids, its text, and the row's other columns (for the reward)."""

    prompt_ids: list[int]
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    @property
    def length(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt_ids)
