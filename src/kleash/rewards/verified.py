"""Rules that ask a verifier in a child process: mathematical equality, and the tasks of reasoning-gym.

A model's text reaches the verifier's code in the child alone, which has limits of time and memory and cannot
reach out of itself (`kleash.verifiers`).
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kleash.data.gym import parse_task
from kleash.errors import UsageError
from kleash.rewards.answers import ascii_digits, boxed, marked, normal, tagged
from kleash.rewards.rules import NUMBER, Rule
from kleash.verifiers import Reply, ask, require
from kleash.verifiers.pool import SECONDS, Kind

TAIL = 2000
"""Characters at the end of a response without a marked answer in which one is looked for."""
PREFIX = re.compile(
    r"\s*(?:so |thus |therefore |hence )?(?:the )?(?:final )?answer(?: is)?\s*[:=]?\s*", re.IGNORECASE
)
WRONG, RIGHT = Reply(0.0), Reply(1.0)


@dataclass(frozen=True)
class Verified(Rule, ABC):
    """A rule whose answers are judged in child processes, `seconds` of processor time each.

    An answer that takes longer, or more memory than there is, scores 0 and counts as hung. None is for a row
    whose reference the verifier cannot read.
    """

    seconds: float = field(default=SECONDS, kw_only=True)
    kind: ClassVar[Kind]

    def __post_init__(self) -> None:
        require(self.kind, f"{self.option}={self.name}")

    def __call__(self, responses: Sequence[str], **columns: Any) -> list[float | None]:
        return [reply.score for reply in self.judge(responses, **columns)]

    def judge(self, responses: Sequence[str], **columns: Any) -> list[Reply]:
        """A reply to each response, in order; RuntimeWarning where references cannot be read."""
        prepared = [self.prepare(i, response, columns) for i, response in enumerate(responses)]
        asked = iter(ask(self.kind, (p for p in prepared if not isinstance(p, Reply)), self.seconds))
        replies = [p if isinstance(p, Reply) else next(asked) for p in prepared]
        self._warn(replies)
        return replies

    @abstractmethod
    def prepare(
        self, row: int, response: str, columns: Mapping[str, Sequence[Any]]
    ) -> Reply | dict[str, Any]:
        """The reply to one response where it is plain, else what to ask the verifier."""

    def _warn(self, replies: Iterable[Reply]) -> None:
        faults = [(row, reply.fault) for row, reply in enumerate(replies, start=1) if reply.fault]
        if faults:
            warnings.warn(
                f"{self.option} {self.name}: {len(faults)} responses have no score, because what they are "
                f"compared with cannot be read; the first is response {faults[0][0]}: {faults[0][1]}.",
                RuntimeWarning,
                stacklevel=4,
            )


@dataclass(frozen=True)
class Math(Verified):
    """1 where the response's answer is mathematically that of `column`, else 0, by math-verify.

    The answer is in the last `\\boxed{…}` or after the last `####`; in a response without either math-verify
    looks for a formula or number near the end. The column holds the answer, or a text that marks it in these
    ways. Answers equal as text are right without a verifier. No score where the column is empty or holds
    nothing that math-verify can read.
    """

    column: str = "answer"
    name: str = field(default="math", kw_only=True)
    kind: ClassVar[Kind] = "math"

    def prepare(
        self, row: int, response: str, columns: Mapping[str, Sequence[Any]]
    ) -> Reply | dict[str, Any]:
        value = self.rows(columns, self.column)[row]
        text = "" if value is None else str(value)
        marked_answer = marked(text)
        expected = text if marked_answer is None else marked_answer
        if not expected.strip():
            return Reply(None, fault=f"column {self.column!r} is empty")
        found = marked(response)
        if found is not None and normal(found) == normal(expected):
            return RIGHT
        answer = _tail(response) if found is None else found
        if not answer.strip():
            return WRONG
        return {"expected": ascii_digits(expected), "found": ascii_digits(answer), "boxed": found is not None}


def _tail(text: str) -> str:
    """The end of a text, from a space on where it is cut."""
    return text if len(text) <= TAIL else text[-TAIL:].partition(" ")[2]


@dataclass(frozen=True)
class Gym(Verified):
    """The score, 0 to 1, that reasoning-gym's task gives the response, for rows of `data=gym:TASK`.

    The answer is in the last `<answer>…</answer>`. Unless `strict`, a response without one is read further:
    the last `\\boxed{…}`, else as many of its last lines as the row's answer has (without "The answer is:"),
    and of these the last number where the row's answer is a number. `task`: rows of any other are an error.
    """

    task: str | None = None
    strict: bool = False
    name: str = field(default="gym", kw_only=True)
    kind: ClassVar[Kind] = "gym"

    def prepare(
        self, row: int, response: str, columns: Mapping[str, Sequence[Any]]
    ) -> Reply | dict[str, Any]:
        spec, entry = (self._of(columns, column)[row] for column in ("gym_task", "gym_entry"))
        if not isinstance(spec, str) or not isinstance(entry, str):
            return Reply(None, fault="the row is of no task (gym_task and gym_entry are empty)")
        task, parameters = parse_task(spec)
        if self.task is not None and task != self.task:
            raise UsageError(
                f"{self.option} gym:{self.task}: response {row + 1} is to a prompt of {task}. Give "
                f"{self.option}=gym, which scores every row by its own task."
            )
        found = tagged(response)
        if found is None and not self.strict:
            expected = columns["answer"][row] if "answer" in columns else None
            found = loose_answer(response, "" if expected is None else str(expected))
        if not found:
            return WRONG
        return {"task": task, "parameters": parameters, "entry": entry, "found": found}

    def _of(self, columns: Mapping[str, Sequence[Any]], column: str) -> Sequence[Any]:
        if column not in columns:
            raise UsageError(
                f"{self.option} gym: the prompts have no column {column!r}, so they are of no task. Read "
                f"them with data=gym:{self.task or 'letter_counting'}."
            )
        return columns[column]


def loose_answer(response: str, expected: str) -> str:
    """The answer of a response that does not mark it with tags (see Gym); "" where there is none."""
    box = boxed(response)
    if box is not None:
        return box.strip()
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    wanted = max(1, len(expected.strip().splitlines()))
    answer = PREFIX.sub("", "\n".join(lines[-wanted:]), count=1)
    if NUMBER.fullmatch(expected.strip()):
        numbers = [match[0] for match in NUMBER.finditer(answer)]
        return numbers[-1] if numbers else answer
    return answer if expected.rstrip().endswith(".") else answer.removesuffix(".")


def gym(argument: str, option: str) -> Gym:
    """`gym`, `gym:strict` or `gym:TASK`."""
    if argument == "strict":
        return Gym(strict=True, option=option)
    return Gym(argument or None, option=option)
