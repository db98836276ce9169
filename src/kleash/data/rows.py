"""Records (dicts as a file holds them) -> rows with checked, normalised content, one parser a kind.

A text is a string or a list of messages `{"role": …, "content": …}`; within one row all texts are of one
sort.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kleash.data.files import Record, short
from kleash.data.transcripts import HUMAN, Message, is_transcript, last_prompt, shared_prompt

Kind = Literal["demonstrations", "preferences", "ranked", "unpaired", "prompts", "stepwise"]
Text = str | list[Message]
ROLES = ("system", "user", "assistant", "tool")
MISSPELT = 0.75  # likeness to one of these from which another role is taken for a misspelling of it


class RowFault(Exception):
    """A row that cannot be used: `reason` is short and counted, the message says what was found."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Malformed(RowFault):
    """The row is not of the kind asked for."""


class Useless(RowFault):
    """The row is well formed, but nothing can be learnt from it: an empty answer, two equal answers."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row has: the prompt, the 1-based number in the file, and the columns not used otherwise."""

    prompt: Text
    number: int
    columns: Record = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Demonstration(Row):
    """A prompt and what should follow it; as messages, from the first turn that may be trained."""

    completion: Text


@dataclass(frozen=True, kw_only=True)
class Preference(Row):
    """A prompt and two responses, the first preferred."""

    chosen: Text
    rejected: Text


@dataclass(frozen=True, kw_only=True)
class Ranked(Row):
    """A prompt and several responses; the lowest rank is the best, equal ranks are ties."""

    responses: list[Text]
    ranks: list[float]


@dataclass(frozen=True, kw_only=True)
class Unpaired(Row):
    """A prompt and one response, with whether it is wanted."""

    completion: Text
    label: bool


@dataclass(frozen=True, kw_only=True)
class Prompt(Row):
    """A prompt alone; its columns reach the reward function."""


@dataclass(frozen=True, kw_only=True)
class Stepwise(Row):
    """A prompt and the steps of one solution, each with whether it is right."""

    completions: list[str]
    labels: list[bool]


EXAMPLES: dict[Kind, str] = {
    "demonstrations": '{"prompt": "Say hi.", "completion": "Hi!"} or {"messages": '
    '[{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi!"}]}',
    "preferences": '{"prompt": "Say hi.", "chosen": "Hi!", "rejected": "No."}',
    "ranked": '{"prompt": "Say hi.", "responses": ["Hi!", "Hm.", "No."], "ranks": [1, 2, 3]}',
    "unpaired": '{"prompt": "Say hi.", "completion": "Hi!", "label": true}',
    "prompts": '{"prompt": "Say hi."}',
    "stepwise": '{"prompt": "2+2*3?", "completions": ["2*3=6.", "2+6=9."], "labels": [true, false]}',
}


def parse_row(record: Record, number: int, kind: Kind) -> Row:
    """One record as a row of `kind`; raises Malformed or Useless. NaN in unused columns becomes None."""
    record = {key: None if _is_nan(value) else value for key, value in record.items()}
    _check_encodable(record)
    return PARSERS[kind](record, number)


# ---- one parser a kind ----


def _demonstration(record: Record, number: int) -> Demonstration:
    """From prompt and completion, from messages, or from a preference row's chosen answer."""
    if _has(record, "messages") and not _has(record, "completion"):
        prompt: Text
        completion: Text
        prompt, completion = _split_messages(_messages(record, "messages"))
        used = ["messages"]
    elif _has(record, "chosen", "rejected") and not _has(record, "completion"):
        pair = _preference(record, number)
        return Demonstration(prompt=pair.prompt, completion=pair.chosen, number=number, columns=pair.columns)
    else:
        used = ["prompt", "completion"]
        prompt, completion = _same_sort(*(_text(record, column, "demonstrations") for column in used))
    _check_answer(completion, used[-1])
    return Demonstration(prompt=prompt, completion=completion, number=number, columns=_others(record, used))


def _preference(record: Record, number: int) -> Preference:
    """From chosen and rejected, with the prompt in its own column or as what both begin with."""
    chosen, rejected = (_text(record, column, "preferences") for column in ("chosen", "rejected"))
    chosen, rejected = _as_answer(rejected, chosen), _as_answer(chosen, rejected)
    given = _text(record, "prompt", "preferences") if "prompt" in record else None
    prompt, chosen, rejected = _split_pair(given, chosen, rejected)
    for text, column in ((chosen, "chosen"), (rejected, "rejected")):
        _check_answer(text, column)
        _check_one_turn(prompt, text, column)
    if _bare(chosen) == _bare(rejected):
        raise Useless(
            "chosen and rejected are the same", f"'chosen' and 'rejected' are the same: {short(chosen)}."
        )
    columns = _others(record, ["prompt", "chosen", "rejected"])
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected, number=number, columns=columns)


def _ranked(record: Record, number: int) -> Ranked:
    prompt = _text(record, "prompt", "ranked")
    responses = _list(record, "responses", "ranked", str)
    ranks = [float(rank) for rank in _list(record, "ranks", "ranked", (int, float))]
    _check_counts(responses, "responses", ranks, "ranks")
    if any(math.isnan(rank) for rank in ranks):
        raise Malformed("NaN rank", "'ranks' holds NaN; leave out a response that was not ranked.")
    for response in responses:
        _check_answer(response, "responses")
    return Ranked(
        prompt=prompt,
        responses=[_as_answer(prompt, response) for response in responses],
        ranks=ranks,
        number=number,
        columns=_others(record, ["prompt", "responses", "ranks"]),
    )


def _unpaired(record: Record, number: int) -> Unpaired:
    prompt, completion = _same_sort(
        *(_text(record, column, "unpaired") for column in ("prompt", "completion"))
    )
    label = _label(_column(record, "label", "unpaired"), "label")
    _check_answer(completion, "completion")
    columns = _others(record, ["prompt", "completion", "label"])
    return Unpaired(prompt=prompt, completion=completion, label=label, number=number, columns=columns)


def _prompt(record: Record, number: int) -> Prompt:
    """From a prompt; from messages, without a closing answer; or the prompt two preferences share."""
    if _has(record, "messages") and not _has(record, "prompt"):
        messages = _messages(record, "messages")
        prompt: Text = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        used = ["messages"]
    elif _has(record, "chosen", "rejected") and not _has(record, "prompt"):
        pair = _preference(record, number)
        prompt, used = pair.prompt, ["chosen", "rejected"]
    else:
        prompt, used = _text(record, "prompt", "prompts"), ["prompt"]
        if isinstance(prompt, str) and is_transcript(prompt):
            prompt = last_prompt(prompt)
    if not _bare(prompt):
        raise Useless("empty prompt", "the prompt is empty or only white space.")
    return Prompt(prompt=prompt, number=number, columns=_others(record, used))


def _stepwise(record: Record, number: int) -> Stepwise:
    prompt = _text(record, "prompt", "stepwise")
    steps = _list(record, "completions", "stepwise", str)
    labels = [_label(value, "labels") for value in _list(record, "labels", "stepwise", (bool, int, str))]
    _check_counts(steps, "completions", labels, "labels")
    for step in steps:
        _check_answer(step, "completions")
    columns = _others(record, ["prompt", "completions", "labels"])
    return Stepwise(prompt=prompt, completions=steps, labels=labels, number=number, columns=columns)


PARSERS: dict[Kind, Callable[[Record, int], Row]] = {
    "demonstrations": _demonstration,
    "preferences": _preference,
    "ranked": _ranked,
    "unpaired": _unpaired,
    "prompts": _prompt,
    "stepwise": _stepwise,
}


# ---- columns ----


def _has(record: Record, *names: str) -> bool:
    """Whether all these columns hold something; a table of mixed rows fills the ones it lacks with null."""
    return all(record.get(name) is not None for name in names)


def _column(record: Record, name: str, kind: Kind) -> Any:
    """A column's value; Malformed names the columns found and the one that looks like a misspelling."""
    if name not in record:
        spelt = {str(key).lower(): key for key in record}
        near = difflib.get_close_matches(name, spelt, n=1)
        hint = f" Is {spelt[near[0]]!r} meant? Rename it to '{name}'." if near else ""
        raise Malformed(
            f"no column '{name}'",
            f"no column '{name}'; found {', '.join(map(repr, record)) or 'no columns'}.{hint} "
            f"Expected a row like {EXAMPLES[kind]}.",
        )
    if record[name] is None:
        raise Malformed(f"'{name}' is missing", f"'{name}' is missing (null or NaN); expected text.")
    return record[name]


def _text(record: Record, name: str, kind: Kind) -> Text:
    value = _column(record, name, kind)
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return _messages(record, name)
    found = (
        f"a dict with keys {list(value)}"
        if isinstance(value, Mapping)
        else f"{type(value).__name__} {short(value)}"
    )
    raise Malformed(
        f"'{name}' is not text",
        f"'{name}' is {found}, where text (a string, or a list of messages) is expected: {EXAMPLES[kind]}.",
    )


def _messages(record: Record, name: str) -> list[Message]:
    """A checked list of messages; text parts of one content are joined, keys that hold None are left out."""
    value = _from_json(record[name])
    if not isinstance(value, (list, tuple)) or not value:
        raise Malformed(
            f"'{name}' is not messages",
            f"'{name}' must be a non-empty list of messages, not {short(value)}.",
        )
    return [_message(message, name, i) for i, message in enumerate(value)]


def _message(value: Any, name: str, position: int) -> Message:
    where = f"'{name}'[{position}]"
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str) or "content" not in value:
        found = f"keys {list(value)}" if isinstance(value, Mapping) else short(value)
        raise Malformed(
            f"'{name}' is not messages",
            f'{where} must be {{"role": "user", "content": "text"}}; found {found}.',
        )
    _check_role(value["role"], where)
    content = value["content"]
    if isinstance(content, (list, tuple)) and all(
        isinstance(p, Mapping) and p.get("type") == "text" for p in content
    ):
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise Malformed(
            f"'{name}' holds no text", f"{where} has content {short(content)}, where text is expected."
        )
    return {key: item for key, item in value.items() if item is not None} | {"content": content}


def _check_role(role: str, where: str) -> None:
    """Malformed for a misspelt role, which many chat templates would print as it is; other roles are theirs
    to judge.
    """
    near = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=MISSPELT)
    if near and role not in ROLES:
        raise Malformed("misspelt role", f"{where} has the role {role!r}: is {near[0]!r} meant?")


def _list(record: Record, name: str, kind: Kind, types: type | tuple[type, ...]) -> list[Any]:
    value = _from_json(_column(record, name, kind))
    if (
        not isinstance(value, (list, tuple))
        or not all(isinstance(item, types) for item in value)
        or not value
    ):
        raise Malformed(
            f"'{name}' is not a list as expected",
            f"'{name}' is {short(value)}; expected a non-empty list as in {EXAMPLES[kind]}.",
        )
    return list(value)


def _from_json(value: Any) -> Any:
    """Lists in a CSV are written as JSON text; anything that is not such text is returned as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value  # the caller reports the text as not being a list
    return value


def _label(value: Any, name: str) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    key = str(value).strip().lower()
    if key not in words:
        raise Malformed(
            f"'{name}' is not true or false", f"'{name}' is {short(value)}; expected true or false."
        )
    return words[key]


def _others(record: Record, used: Sequence[str]) -> Record:
    return {key: value for key, value in record.items() if key not in used}


# ---- prompts and answers ----


def _same_sort(prompt: Text, answer: Text) -> tuple[Text, Text]:
    """Both as strings or both as messages: a lone string beside messages becomes a turn."""
    if isinstance(prompt, str) and not isinstance(answer, str):
        return [{"role": "user", "content": prompt}], answer
    return prompt, _as_answer(prompt, answer)


def _as_answer(prompt: Text, answer: Text) -> Text:
    """An answer as the prompt's sort: a string after messages becomes the assistant's turn."""
    if isinstance(answer, str) and not isinstance(prompt, str):
        return [{"role": "assistant", "content": answer}]
    return answer


def _split_messages(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """A conversation before and from its first assistant turn; what follows the last one is left off."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        raise Malformed(
            "no assistant turn to train" if not turns else "the assistant speaks first",
            "'messages' needs a user turn, then an assistant turn; its roles: "
            f"{[m['role'] for m in messages]}.",
        )
    return messages[: turns[0]], messages[turns[0] : turns[-1] + 1]


def _split_pair(given: Text | None, chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Prompt and two answers, where the answers may repeat the prompt or hold it alone."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _split_strings(given, chosen, rejected)
    assert not isinstance(chosen, str) and not isinstance(rejected, str)  # of one sort by now
    if chosen[0]["role"] == "assistant" or rejected[0]["role"] == "assistant":
        if given is None:
            raise Malformed(
                "no prompt", "no column 'prompt', and 'chosen' opens with the assistant's answer."
            )
        return ([{"role": "user", "content": given}] if isinstance(given, str) else given), chosen, rejected
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    cut = min(len(chosen), len(rejected)) - 1 if same is None else same
    prompt = chosen[:cut]
    if isinstance(given, str):
        stated = not prompt or given.strip() in [m["content"].strip() for m in prompt]
    else:
        stated = given is None or given == prompt
    if not prompt or not stated:
        raise Malformed(
            "prompt and answers disagree",
            f"'chosen' and 'rejected' are whole conversations that share {len(prompt)} first messages, which "
            f"must be the prompt{'' if given is None else f', but the column says {short(given)}'}.",
        )
    return prompt, chosen[cut:], rejected[cut:]


def _split_strings(given: Text | None, chosen: str, rejected: str) -> tuple[Text, Text, Text]:
    if given is not None and not isinstance(given, str):
        return given, _as_answer(given, chosen), _as_answer(given, rejected)
    if given is not None:
        repeated = is_transcript(given) and chosen.startswith(given) and rejected.startswith(given)
        return (
            (given, chosen[len(given) :], rejected[len(given) :]) if repeated else (given, chosen, rejected)
        )
    prompt = shared_prompt(chosen, rejected)
    if not prompt:
        raise Malformed(
            "no prompt",
            f"no column 'prompt', and 'chosen' and 'rejected' share no beginning: {short(chosen)} and "
            f"{short(rejected)}. Expected a row like {EXAMPLES['preferences']}.",
        )
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _check_answer(answer: Text, column: str) -> None:
    if not (answer if isinstance(answer, str) else answer[-1]["content"]).strip():
        raise Useless("empty answer", f"'{column}' is empty or only white space.")
    if not isinstance(answer, str) and answer[-1]["role"] != "assistant":
        raise Malformed(
            "the answer is not the assistant's",
            f"'{column}' ends with a turn by {answer[-1]['role']!r}; the answer must be an assistant turn.",
        )


def _check_one_turn(prompt: Text, answer: Text, column: str) -> None:
    """An answer whose later turns are the user's would train the user's words as if they were the model's."""
    turns = answer.count(HUMAN) if isinstance(answer, str) and is_transcript(str(prompt)) else 0
    if turns or (not isinstance(answer, str) and len(answer) > 1):
        raise Useless(
            "several turns in one answer", f"'{column}' goes on for several turns; an answer must be one."
        )


def _check_counts(first: list[Any], first_name: str, second: list[Any], second_name: str) -> None:
    if len(first) != len(second):
        raise Malformed(
            f"counts of {first_name} and {second_name} differ",
            f"{len(first)} {first_name} but {len(second)} {second_name}; each needs its own.",
        )


def _bare(text: Text) -> Any:
    """A text without outer white space, to compare or to test for emptiness."""
    if isinstance(text, str):
        return text.strip()
    return (
        [(m["role"], m["content"].strip()) for m in text] if any(m["content"].strip() for m in text) else []
    )


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _check_encodable(value: Any, path: str = "") -> None:
    """Malformed where a string holds half of a surrogate pair: no tokenizer and no UTF-8 file can take it."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Malformed(
                "lone surrogate",
                f"'{path}' holds a lone surrogate \\u{ord(value[error.start]):04x} at character "
                f"{error.start}: half of a character cut in two by whatever wrote the file. Write the row "
                "again from its source.",
            ) from error
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_encodable(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check_encodable(item, f"{path}[{i}]")
