"""Call a reward function and believe nothing it returns until it is checked.

A reward is any callable `(prompts, responses, **columns) -> list[float | None]`. It may ask for as few of the
columns as it likes, and `completions` is understood as another word for `responses`. None means that a
response has no score: it is counted and left out, never taken as zero. Everything else that is not a finite
number stops the run with a message that names the function and the response. Functions written for TRL work
unchanged, `async` ones too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import math
import numbers
import os
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kleash.errors import KLeashError, RunError, UsageError
from kleash.rewards.combine import CombinedReward
from kleash.rewards.trained import ModelReward
from kleash.rewards.verified import Verified

if TYPE_CHECKING:
    from kleash.sampling import Rollouts

Reward = Callable[..., Sequence[float | None]]
_Outcome = tuple[Any, "BaseException | None"]

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
    logged: dict[str, tuple[float, float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def present(self) -> Tensor:
        """(N,) bool: the responses that have a score."""
        return ~self.values.isnan()

    def take(self, rows: Sequence[int]) -> Scores:
        """The scores of some responses, in that order; `hung` and `logged` stay those of the whole call."""
        values = self.values[list(rows)]
        parts = {name: part[list(rows)] for name, part in self.parts.items()}
        return Scores(values, int(values.isnan().sum()), parts, self.hung, self.logged)

    @classmethod
    def join(cls, several: Sequence[Scores]) -> Scores:
        """The scores of several calls of one reward, one after another."""
        logged: dict[str, tuple[float, float]] = {}
        for name, (said, count) in (item for scores in several for item in scores.logged.items()):
            before = logged.get(name, (0.0, 0.0))
            logged[name] = before[0] + said, before[1] + count
        return cls(
            torch.cat([scores.values for scores in several]),
            sum(scores.missing for scores in several),
            {name: torch.cat([scores.parts[name] for scores in several]) for name in several[0].parts},
            sum(scores.hung for scores in several),
            logged,
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
    workers: int = 0,
    option: str = "reward",
    step: int = 0,
) -> Scores:
    """Score rollouts as `score_texts` does, with their columns, `prompt_ids` and `response_ids` on offer."""
    columns = dict(rollouts.columns)
    columns["prompt_ids"] = _id_lists(rollouts.prompt_ids, rollouts.prompt_mask)
    columns["response_ids"] = _id_lists(rollouts.response_ids, rollouts.response_mask)
    return score_texts(
        reward,
        rollouts.prompts,
        rollouts.responses,
        columns,
        timeout,
        workers=workers,
        option=option,
        step=step,
    )


def score_texts(
    reward: Reward | CombinedReward,
    prompts: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    timeout: float | None = TIMEOUT,
    *,
    workers: int = 0,
    option: str = "reward",
    step: int = 0,
) -> Scores:
    """Score N responses and check the answer.

    A function is called once with all N, or by `workers` threads with one response a call, in order all the
    same. A call that takes longer than `timeout` seconds is left behind in its thread: its responses become
    missing, a RuntimeWarning says so, and the run goes on; with `workers` only the response that hangs is
    lost. Reward models and verifiers are called once, whatever `workers` is: they have limits of their own. A
    combined score is missing where any of its weighted parts is. `option`, for messages, is where the reward
    came from; `step` is the training step, for functions that ask for `trainer_state`. Raises UsageError
    where the function cannot be called, RunError where it raises or returns nonsense.
    """
    rewards = reward.rewards if isinstance(reward, CombinedReward) else {reward_name(reward): reward}
    columns = {"prompts": list(prompts), "responses": list(responses), **(columns or {})}
    how, log = _How(timeout, workers, option, step), _Log(step)
    parts, hung = {}, torch.zeros(len(prompts), dtype=torch.bool)
    for name, part in rewards.items():
        parts[name], lost = _score_one(part, name, columns, how, log)
        hung |= lost
    values = reward.total(parts) if isinstance(reward, CombinedReward) else next(iter(parts.values()))
    logged = {name: (sum(said), float(len(said))) for name, said in log.metrics.items()}
    return Scores(values, int(values.isnan().sum()), parts, int(hung.sum()), logged, log.extra)


@dataclass(frozen=True)
class _How:
    """How functions are called: see score_texts."""

    timeout: float | None
    workers: int
    option: str
    step: int


@dataclass
class _Log:
    """What TRL gives a function beside columns, and what the function says through it."""

    step: int
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    OFFERS = ("trainer_state", "log_metric", "log_extra")

    def offer(self, name: str) -> Any:
        """One of OFFERS. The trainer's state knows its `global_step` (0 outside training) and no more."""
        if name == "trainer_state":
            from transformers import TrainerState

            return TrainerState(global_step=self.step)
        return self.log_metric if name == "log_metric" else self.log_extra

    def log_metric(self, name: str, value: float) -> None:
        """Note a number; those of a name are averaged."""
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Note a value for each response of the call."""
        self.extra.setdefault(column, []).extend(values)

    def add(self, other: _Log) -> None:
        """Take over what was said in one call."""
        for name, said in other.metrics.items():
            self.metrics.setdefault(name, []).extend(said)
        for column, values in other.extra.items():
            self.log_extra(column, values)


def _score_one(
    reward: Reward, name: str, columns: Mapping[str, Sequence[Any]], how: _How, log: _Log
) -> tuple[Tensor, Tensor]:
    """One reward's values (N,), nan where missing, and which of them (N,) ran out of time or memory."""
    count = len(columns["prompts"])
    wanted = accepted_columns(reward, f"{how.option} {name}", columns)
    if isinstance(reward, Verified):
        replies = reward.judge(**{key: columns[column] for key, column in wanted.items()})
        hung = torch.tensor([reply.stopped for reply in replies], dtype=torch.bool)
        return _checked(
            [reply.score for reply in replies], _Where(how.option, name, columns["prompts"])
        ), hung
    workers = 0 if isinstance(reward, ModelReward) else how.workers
    size = 1 if workers else max(count, 1)

    def score(start: int) -> tuple[Tensor | None, _Log]:
        rows, said = slice(start, start + size), _Log(how.step)
        where = _Where(how.option, name, columns["prompts"], start, min(size, count - start))
        given = {
            key: list(columns[column][rows]) if column in columns else said.offer(column)
            for key, column in wanted.items()
        }
        call = functools.partial(reward, **given)
        if isinstance(reward, ModelReward):  # our own forward pass: it cannot hang
            return _checked(call(), where), said
        returned, in_time = _call_within(call, how.timeout, where)
        return (_checked(returned, where) if in_time else None), said

    values, hung = torch.full((count,), math.nan), torch.zeros(count, dtype=torch.bool)
    starts = range(0, count, size)
    for start, (scores, said) in zip(starts, _in_order(score, starts, workers), strict=True):
        rows = slice(start, start + size)
        if scores is None:
            hung[rows] = True
        else:
            values[rows] = scores
            log.add(said)
    _warn_of_hung(hung, how, _Where(how.option, name, columns["prompts"]))
    return values, hung


def _in_order(score: Callable[[int], Any], starts: Sequence[int], workers: int) -> list[Any]:
    """`score` of each start, by so many threads; after an error those that have not begun never do."""
    if not workers:
        return list(map(score, starts))
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(score, starts))


def _warn_of_hung(hung: Tensor, how: _How, where: _Where) -> None:
    if hung.any():
        first = int(hung.int().argmax())
        warnings.warn(
            f"{where.title} did not return within {how.timeout:g} seconds: {int(hung.sum())} responses, the "
            f"first {where.response(first)}, count as missing. What hangs goes on in the background. Give it "
            "more time (reward_timeout), one response a call (reward_workers), or a limit of its own.",
            RuntimeWarning,
            stacklevel=5,
        )


def accepted_columns(reward: Reward, title: str, columns: Mapping[str, Any]) -> dict[str, str]:
    """Which keyword of the reward gets which column, or which of `_Log.OFFERS`, if it names them.

    UsageError where it does not take the responses, or needs a column that is not there.
    """
    aliases = {"completions": "responses", "completion_ids": "response_ids"}
    available = {name: name for name in (*_Log.OFFERS, *columns)}
    available |= {key: column for key, column in aliases.items() if column in columns}
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{title}: Python cannot tell which arguments it takes ({error}). Wrap it in a function: "
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
        offered = ", ".join(sorted(set(available) - set(_Log.OFFERS)))
        raise UsageError(
            f"{title} {lacking}, but what it can be given is: {offered}. Name its "
            "arguments after these, for example `def reward(prompts, responses, **columns): ...`; other "
            "columns come from the rows of the prompt file."
        )
    return wanted


@dataclass(frozen=True)
class _Where:
    """Which responses a call was about, for messages."""

    option: str
    name: str
    prompts: Sequence[str]
    start: int = 0
    size: int | None = None

    @property
    def title(self) -> str:
        """'reward grade', or 'gold grade'."""
        return f"{self.option} {self.name}"

    @property
    def count(self) -> int:
        """How many responses."""
        return len(self.prompts) if self.size is None else self.size

    def response(self, offset: int) -> str:
        """'response 5 of 8 (prompt "…")', numbered from 1 over the whole set."""
        at = self.start + offset
        return f"response {at + 1} of {len(self.prompts)} (prompt {_short(self.prompts[at])})"

    def failure(self, error: BaseException) -> RunError:
        """The user's own exception as one paragraph with the line of their file."""
        last = self.start + self.count
        which = self.response(0) if self.count == 1 else f"responses {self.start + 1} to {last}"
        messages = isinstance(error, TypeError) and "string ind" in str(error)  # completion[0]["content"]
        hint = (
            " Completions are texts here; TRL gives those of chats as lists of messages." if messages else ""
        )
        return RunError(
            f"{self.title} raised {type(error).__name__}: {error} ({line_of(error)}) while scoring "
            f"{which}. Mend the function; where a response has no score, return None for it.{hint}"
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
    outcome: list[_Outcome] = []

    @torch.no_grad()
    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # even SystemExit: it is raised again below, where somebody sees it
            outcome.append((None, error))

    started = time.monotonic()
    thread = threading.Thread(target=work, name=where.title, daemon=True)
    thread.start()
    thread.join(timeout)
    if outcome and inspect.isawaitable(outcome[0][0]):
        left = None if timeout is None else max(0.0, started + timeout - time.monotonic())
        outcome = _awaited(outcome[0][0], left)
    if not outcome:
        return None, False
    returned, error = outcome[0]
    if isinstance(error, KLeashError):
        raise error
    if error is not None:
        raise where.failure(error) from error
    return returned, True


def _awaited(returned: Awaitable[Any], timeout: float | None) -> list[_Outcome]:
    """What an async function came to; empty where it did not in time. All calls share an event loop, as the
    clients that such functions use expect.
    """

    async def outcome() -> _Outcome:
        try:
            return await returned, None
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a TimeoutError of the function's own must not pass for ours
            return None, error

    future = asyncio.run_coroutine_threadsafe(outcome(), _event_loop(os.getpid()))
    try:
        return [future.result(timeout)]
    except concurrent.futures.TimeoutError:
        future.cancel()
        _event_loop.cache_clear()  # if it blocks the loop, the next call must not wait behind it
        return []


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """A loop in a daemon thread of this process (a fork has its parent's loop, but not its thread)."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


def _checked(returned: Any, where: _Where) -> Tensor:
    """What a reward returned as (n,) float32, nan for None; RunError for anything that is not n numbers."""
    expected = f"expected a list of {where.count} numbers, one a response (None where there is no score)"
    if isinstance(returned, Tensor) or hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        hint = " Does the function end without `return`?" if returned is None else ""
        raise RunError(f"{where.title} returned {_short(returned)}; {expected}.{hint}")
    if len(returned) != where.count:
        raise RunError(
            f"{where.title} returned {len(returned)} values for {where.count} responses; {expected}."
        )
    return torch.tensor([_number(value, where, i) for i, value in enumerate(returned)], dtype=torch.float32)


def _number(value: Any, where: _Where, offset: int) -> float:
    if value is None:
        return math.nan
    item = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(item, numbers.Real):
        raise RunError(
            f"{where.title} returned {_short(value)} for {where.response(offset)}; expected a number, "
            "or None where there is no score."
        )
    if not abs(float(item)) <= torch.finfo(torch.float32).max:
        raise RunError(
            f"{where.title} returned {float(item)} for {where.response(offset)}; expected a finite "
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
