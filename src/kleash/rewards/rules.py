"""Small rules that score text without a model. Every one returns a float for every response, never None.

By name, in a recipe or on the command line: `exact:answer`, `number:answer`, `boxed:answer`, `regex:PATTERN`,
`length:200`, `format:think,answer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from kleash.errors import UsageError
from kleash.rewards.answers import boxed, normal

NUMBER = re.compile(
    r"(?<![\d.,])"  # not in the middle of another number
    r"(?P<sign>(?<![\w)\]])[-+\N{MINUS SIGN}]\s?\$?|)"  # a sign, but not the minus of "5-3"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,2}(?!\d))?"
    r"(?:/(?P<under>\d+(?:\.\d+)?))?"
)


def last_number(text: str) -> float | None:
    """The last number in a text: sign, thousands commas, decimals, exponents, a/b fractions; None where there
    is none.
    """
    found = None
    for match in NUMBER.finditer(text):
        value = Fraction(match["digits"].replace(",", "") + (match["exponent"] or ""))
        under = Fraction(match["under"]) if match["under"] else Fraction(1)
        if under:
            found = float(-value / under if match["sign"][:1] in ("-", "\N{MINUS SIGN}") else value / under)
    return found


@dataclass(frozen=True)
class Rule:
    """What rules share: a name, and the option they were given in (reward or gold), for messages and logs."""

    name: str = field(default="rule", kw_only=True)
    option: str = field(default="reward", kw_only=True, compare=False)

    def rows(self, columns: Mapping[str, Any], column: str) -> Sequence[Any]:
        """The column to compare with; UsageError where the prompts have none of that name."""
        if column not in columns:
            raise UsageError(
                f"{self.option} {self.name}: the prompts have no column {column!r} to compare with (they "
                f"have: {', '.join(sorted(columns))}). Name the column after the rule, as in "
                f"`{self.name}:answer`."
            )
        found: Sequence[Any] = columns[column]
        return found


@dataclass(frozen=True)
class ExactMatch(Rule):
    """1 where the response is the expected text of `column`, else 0. Case and surrounding or doubled spaces
    are ignored unless `strict`.
    """

    column: str = "answer"
    strict: bool = False
    name: str = field(default="exact", kw_only=True)

    def __call__(self, responses: Sequence[str], **columns: Any) -> list[float]:
        expected = self.rows(columns, self.column)
        return [
            float(self._plain(r) == self._plain(str(e))) for r, e in zip(responses, expected, strict=True)
        ]

    def _plain(self, text: str) -> str:
        return text if self.strict else " ".join(text.split()).casefold()


@dataclass(frozen=True)
class Number(Rule):
    """1 where the last number of the response is the last number of `column`, within `tolerance` (absolute or
    relative, whichever is wider), else 0. A response without a number scores 0; an expected value without one
    is an error.
    """

    column: str = "answer"
    tolerance: float = 1e-6
    name: str = field(default="number", kw_only=True)

    def __call__(self, responses: Sequence[str], **columns: Any) -> list[float]:
        expected = self.rows(columns, self.column)
        return [
            self._score(r, e, i) for i, (r, e) in enumerate(zip(responses, expected, strict=True), start=1)
        ]

    def _score(self, response: str, expected: Any, row: int) -> float:
        target = last_number(str(expected))
        if target is None:
            raise UsageError(
                f"{self.option} {self.name}: column {self.column!r} of response {row} holds {expected!r}, in "
                "which there is no number to compare with. Mend the row, or use `exact` for answers that are "
                "words."
            )
        found = last_number(response)
        return float(found is not None and abs(found - target) <= self.tolerance * max(1.0, abs(target)))


@dataclass(frozen=True)
class Boxed(Rule):
    """1 where the last `\\boxed{…}` of the response holds the text of `column`, else 0; 0 without one.

    Compared as text by `answers.normal`: nothing is computed. A column that itself holds a `\\boxed{…}`, such
    as a whole solution, stands for what is in it.
    """

    column: str = "answer"
    name: str = field(default="boxed", kw_only=True)

    def __call__(self, responses: Sequence[str], **columns: Any) -> list[float]:
        expected = self.rows(columns, self.column)
        return [self._score(r, str(e)) for r, e in zip(responses, expected, strict=True)]

    def _score(self, response: str, expected: str) -> float:
        found, inside = boxed(response), boxed(expected)
        return float(found is not None and normal(found) == normal(expected if inside is None else inside))


@dataclass(frozen=True)
class Regex(Rule):
    """1 where the pattern is found in the response (`whole`: matches all of it), else 0.

    Keep patterns free of nested repetition: Python's matcher cannot be interrupted, not even by the timeout.
    """

    pattern: str
    whole: bool = False
    name: str = field(default="regex", kw_only=True)
    compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "compiled", re.compile(self.pattern, re.DOTALL))
        except re.error as error:
            raise UsageError(
                f"{self.option} {self.name}: {self.pattern!r} is not a regular expression: {error}."
            ) from error

    def __call__(self, responses: Sequence[str]) -> list[float]:
        match = self.compiled.fullmatch if self.whole else self.compiled.search
        return [float(match(response) is not None) for response in responses]


@dataclass(frozen=True)
class Length(Rule):
    """1 up to `maximum` tokens (or words), then falling in a straight line to 0 at twice as many."""

    maximum: int
    unit: Literal["tokens", "words"] = "tokens"
    name: str = field(default="length", kw_only=True)

    def __post_init__(self) -> None:
        if self.maximum < 1:
            raise UsageError(
                f"{self.option} {self.name}: the maximum must be at least 1 {self.unit[:-1]}, not "
                f"{self.maximum}."
            )

    def __call__(self, responses: Sequence[str], response_ids: Sequence[Sequence[int]]) -> list[float]:
        pieces = response_ids if self.unit == "tokens" else [response.split() for response in responses]
        return [min(1.0, max(0.0, 2.0 - len(piece) / self.maximum)) for piece in pieces]


@dataclass(frozen=True)
class Tags(Rule):
    """1 where the response is exactly `<think>…</think> <answer>…</answer>` (the tags given, in order, each
    once), else 0.
    """

    tags: tuple[str, ...] = ("think", "answer")
    name: str = field(default="format", kw_only=True)

    def __call__(self, responses: Sequence[str]) -> list[float]:
        return [float(self._matches(response)) for response in responses]

    def _matches(self, text: str) -> bool:
        for tag in self.tags:
            before, opened, text = text.partition(f"<{tag}>")
            inside, closed, text = text.partition(f"</{tag}>")
            if before.strip() or not opened or not closed or f"<{tag}>" in inside:
                return False
        return not text.strip()


def length(argument: str, option: str) -> Length:
    """`length:200`."""
    if not argument.strip().isdecimal():
        raise UsageError(
            f"{option} length:{argument}: expected a number of tokens, for example `length:200`."
        )
    return Length(int(argument), option=option)
