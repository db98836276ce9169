"""Call a reward function and believe nothing it returns until it is checked.

A reward is any callable `(prompts, responses, **columns) -> list[float | None]`. It may ask for as few of the
columns as it likes, and `completions` is understood as another word for `responses`. None means that a
response has no score: it is counted and left out, never taken as zero. Everything else that is not a finite
number stops the run with a message that names the function and the response.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kleash.errors import KLeashError, RunError, UsageError
from kleash.rewards.combine import CombinedReward
from kleash.rewards.trained import ModelReward

if TYPE_CHECKING:
    from kleash.sampling import Rollouts

Reward = Callable[..., Sequence[float | None]]

TIMEOUT = 300.0
"""Seconds that one call of a reward function may take."""


@dataclass
class Scores:
    """What a reward said about N responses.

    values (N,) float32, the weighted sum where several rewards are combined, nan where missing; missing: how
    many are; parts: each reward's own values (N,) by name, unweighted; hung: responses lost because a call
    ran out of time.
    """

    values: Tensor
    missing: int
    parts: dict[str, Tensor] = field(default_factory=dict)
    hung: int = 0

    @property
    def present(self) -> Tensor:
        """(N,) bool: the responses that have a score."""
        return ~self.values.isnan()

    def take(self, rows: Sequence[int]) -> Scores:
        """The scores of some responses, in that order; `hung` stays that of the whole call."""
        values = self.values[list(rows)]
        parts = {name: part[list(rows)] for name, part in self.parts.items()}
        return Scores(values, int(values.isnan().sum()), parts, self.hung)

    @classmethod
    def join(cls, several: Sequence[Scores]) -> Scores:
        """The scores of several calls of one reward, one after another."""
        return cls(
            torch.cat([scores.values for scores in several]),
            sum(scores.missing for scores in several),
            {name: torch.cat([scores.parts[name] for scores in several]) for name in several[0].parts},
            sum(scores.hung for scores in several),
        )


def reward_name(reward: object) -> str:
    """A short name for logs: the function's own, that inside a partial, an object's `name`, or its class."""
    if isinstance(reward, functools.partial):
        return reward_name(reward.func)
    name = getattr(reward, "name", None) or getattr(reward, "__name__", None)
    return name.strip("<>") if isinstance(name, str) else type(reward).__name__


def call_reward(
    reward: Reward | CombinedReward,
    rollouts: Rollouts,
    timeout: float | None = TIMEOUT,
    rows_per_call: int | None = None,
) -> Scores:
    """Score rollouts as `score_texts` does, with their columns, `prompt_ids` and `response_ids` on offer."""
    columns = dict(rollouts.columns)
    columns["prompt_ids"] = _id_lists(rollouts.prompt_ids, rollouts.prompt_mask)
    columns["response_ids"] = _id_lists(rollouts.response_ids, rollouts.response_mask)
    return score_texts(reward, rollouts.prompts, rollouts.responses, columns, timeout, rows_per_call)


def score_texts(
    reward: Reward | CombinedReward,
    prompts: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    timeout: float | None = TIMEOUT,
    rows_per_call: int | None = None,
) -> Scores:
    """Score N responses and check the answer.

    Each reward is called once with all N, or with `rows_per_call` at a time. A call that takes longer than
    `timeout` seconds is left behind in its thread: its responses become missing, a RuntimeWarning says so,
    and the run goes on. So `rows_per_call=1` loses only the response that hangs. A combined score is missing
    where any of its weighted parts is. Raises UsageError where the function cannot be called, RunError where
    it raises or returns nonsense.
    """
    rewards = reward.rewards if isinstance(reward, CombinedReward) else {reward_name(reward): reward}
    columns = {"prompts": list(prompts), "responses": list(responses), **(columns or {})}
    parts, hung = {}, torch.zeros(len(prompts), dtype=torch.bool)
    for name, part in rewards.items():
        parts[name], lost = _score_one(part, name, columns, timeout, rows_per_call)
        hung |= lost
    values = reward.total(parts) if isinstance(reward, CombinedReward) else next(iter(parts.values()))
    return Scores(values, int(values.isnan().sum()), parts, int(hung.sum()))


def _score_one(
    reward: Reward,
    name: str,
    columns: Mapping[str, Sequence[Any]],
    timeout: float | None,
    rows_per_call: int | None,
) -> tuple[Tensor, Tensor]:
    """One reward's values (N,), nan where missing, and which of them (N,) a call that hung has cost."""
    count = len(columns["prompts"])
    wanted = accepted_columns(reward, name, columns)
    values, hung = torch.full((count,), math.nan), torch.zeros(count, dtype=torch.bool)
    size = rows_per_call or max(count, 1)
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        call = functools.partial(
            reward, **{key: list(columns[column][rows]) for key, column in wanted.items()}
        )
        where = _Where(reward, name, columns["prompts"], start, rows.stop - start)
        if isinstance(reward, ModelReward):  # our own forward pass: it cannot hang
            returned = call()
        else:
            returned, in_time = _call_within(call, timeout, where)
            if not in_time:
                hung[rows] = True
                continue
        values[rows] = _checked(returned, where)
    return values, hung


def accepted_columns(reward: Reward, name: str, columns: Mapping[str, Any]) -> dict[str, str]:
    """Which keyword of the reward gets which column.

    UsageError where it does not take the responses, or needs a column that is not there.
    """
    aliases = {"completions": "responses", "completion_ids": "response_ids"}
    available = {column: column for column in columns} | {k: v for k, v in aliases.items() if v in columns}
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"reward {name}: Python cannot tell which arguments it takes ({error}). Wrap it in a function: "
            "`def reward(prompts, responses, **columns): ...`"
        ) from error
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    wanted = {key: column for key, column in available.items() if key in named}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        wanted |= {column: column for column in columns}
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    unknown = [key for key in required if key not in wanted]
    if unknown or "responses" not in wanted.values():
        lacking = f"needs {', '.join(unknown)}" if unknown else "does not take the responses"
        raise UsageError(
            f"reward {name} {lacking}, but what it can be given is: {', '.join(sorted(available))}. Name its "
            "arguments after these, for example `def reward(prompts, responses, **columns): ...`; other "
            "columns come from the rows of the prompt file."
        )
    return wanted


@dataclass(frozen=True)
class _Where:
    """Which responses a call was about, for messages."""

    reward: Reward
    name: str
    prompts: Sequence[str]
    start: int
    count: int

    def response(self, offset: int) -> str:
        """'response 5 of 8 (prompt "…")', numbered from 1 over the whole set."""
        at = self.start + offset
        return f"response {at + 1} of {len(self.prompts)} (prompt {_short(self.prompts[at])})"

    def failure(self, error: BaseException) -> RunError:
        """The user's own exception as one paragraph with the line of their file."""
        last = self.start + self.count
        which = self.response(0) if self.count == 1 else f"responses {self.start + 1} to {last}"
        return RunError(
            f"reward {self.name} raised {type(error).__name__}: {error} ({line_of(error)}) while scoring "
            f"{which}. Mend the function; where a response has no score, return None for it."
        )


def line_of(error: BaseException, file: str | None = None) -> str:
    """'rewards.py, line 7': the innermost frame of an error, or the innermost one in `file`."""
    every = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in every if file in (None, frame.filename)] or every
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "no line is known"


def _call_within(call: Callable[[], Any], timeout: float | None, where: _Where) -> tuple[Any, bool]:
    """What `call` returned, and whether it did so within `timeout` seconds.

    A thread and not an alarm, so that it works off the main thread and on every platform; a daemon, so that a
    call that never ends does not keep the process alive. Raises RunError where the call raised.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    @torch.no_grad()
    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # even SystemExit: it is raised again below, where somebody sees it
            outcome.append((None, error))

    thread = threading.Thread(target=work, name=f"reward {where.name}", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        warnings.warn(
            f"reward {where.name} did not return within {timeout:g} seconds: {where.count} responses from "
            f"{where.response(0)} on count as missing. The call goes on in the background. Give it more "
            "time, fewer rows a call, or a limit of its own.",
            RuntimeWarning,
            stacklevel=5,
        )
        return None, False
    returned, error = outcome[0]
    if isinstance(error, KLeashError):
        raise error
    if error is not None:
        raise where.failure(error) from error
    return returned, True


def _checked(returned: Any, where: _Where) -> Tensor:
    """What a reward returned as (n,) float32, nan for None; RunError for anything that is not n numbers."""
    expected = f"expected a list of {where.count} numbers, one a response (None where there is no score)"
    if isinstance(returned, Tensor) or hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        hint = " Does the function end without `return`?" if returned is None else ""
        raise RunError(f"reward {where.name} returned {_short(returned)}; {expected}.{hint}")
    if len(returned) != where.count:
        raise RunError(
            f"reward {where.name} returned {len(returned)} values for {where.count} responses; {expected}."
        )
    return torch.tensor([_number(value, where, i) for i, value in enumerate(returned)], dtype=torch.float32)


def _number(value: Any, where: _Where, offset: int) -> float:
    if value is None:
        return math.nan
    item = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(item, numbers.Real):
        raise RunError(
            f"reward {where.name} returned {_short(value)} for {where.response(offset)}; expected a number, "
            "or None where there is no score."
        )
    if not abs(float(item)) <= torch.finfo(torch.float32).max:
        raise RunError(
            f"reward {where.name} returned {float(item)} for {where.response(offset)}; expected a finite "
            "number up to 3e38 (float32). Return None where there is no score: it is then counted as missing "
            "and left out."
        )
    return float(item)


def _short(value: Any, limit: int = 60) -> str:
    """repr of a value, with its type where that is not plain, cut to `limit` characters."""
    text = repr(value)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text if isinstance(value, (str, type(None))) else f"{text} (a {type(value).__name__})"


def _id_lists(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), mask.cpu().bool(), strict=True)]
