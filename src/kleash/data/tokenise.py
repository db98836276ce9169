"""Rows -> ids: where a prompt ends and what is trained is known by construction, never searched for.

A row is laid out as spans of text, each trained or not, and the ids of every span are appended to those
before it. The prompt's ids are therefore the same ones a sampler starts from, and prompt ids + response ids
are the row.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar

from kleash.data.items import Example, Pair, PromptIds
from kleash.data.layout import ChatMode, Layout, Spans
from kleash.data.sources import Preference, Rows
from kleash.errors import UsageError

__all__ = [
    "ChatMode",
    "Example",
    "Pair",
    "PromptIds",
    "Tokenised",
    "TrainOn",
    "Truncation",
    "pad_id",
    "tokenise_demonstrations",
    "tokenise_preferences",
    "tokenise_prompts",
]

Truncation = Literal["drop", "prompt-left", "response-right"]
TrainOn = Literal["last", "assistant"]
P = ParamSpec("P")
R = TypeVar("R")


class _HasLength(Protocol):
    @property
    def length(self) -> int: ...


T = TypeVar("T", bound=_HasLength)


@dataclass
class Tokenised(Generic[T]):
    """Tokenised items, how many were dropped and why, and how many were cut to fit."""

    items: list[T]
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each item (for a pair, of its longer row): what `plan_epoch` takes."""
        return [item.length for item in self.items]


def pad_id(tokenizer: Any) -> int:
    """An id for padded places: the tokenizer's own, else its end token, else 0; masks decide, so any does."""
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if value is not None:
            return int(value)
    return 0


def _naming_the_source(tokenise: Callable[P, R]) -> Callable[P, R]:
    """The same, with the source of the rows before a message that names a row."""

    @functools.wraps(tokenise)
    def named(*args: P.args, **options: P.kwargs) -> R:
        try:
            return tokenise(*args, **options)
        except UsageError as error:
            rows = args[0] if args else options["rows"]
            if str(error).startswith("Row ") and isinstance(rows, Rows):
                raise UsageError(f"{rows.source}, row {str(error).removeprefix('Row ')}") from error
            raise

    return named


@_naming_the_source
def tokenise_demonstrations(
    rows: Rows,
    tokenizer: Any,
    *,
    max_length: int | None,
    truncation: Truncation = "drop",
    train_on: TrainOn = "assistant",
    chat: ChatMode = "auto",
) -> Tokenised[Example]:
    """Demonstrations (or unpaired rows) as ids; each row ends in exactly one end token, which is trained.

    chat: "auto" renders messages with the chat template and keeps strings plain; "template" makes user and
    assistant turns of strings; "plain" writes messages as a Human/Assistant transcript. train_on: every
    assistant turn with its end-of-turn token, or the last alone. A row longer than max_length is dropped
    ("drop"), loses the beginning of its prompt ("prompt-left") or the end of its response ("response-right");
    one left without a trained token is dropped and counted. Raises UsageError naming the row where a template
    cannot be followed, and when no row is left.
    """
    if train_on not in ("last", "assistant"):
        raise UsageError(f"train_on='{train_on}' must be last or assistant.")
    encoder = _Encoder(tokenizer, chat)
    fit = _Fit(max_length, truncation, encoder.prefix)
    items = []
    for row in rows.rows:
        spans = encoder.layout.demonstration(row.prompt, row.completion, row.number, train_on == "last")
        prompt = encoder.prompt(spans)
        ids, trained = encoder.response(spans, prompt)
        cut = fit.fit(prompt, [ids])
        if cut is None:
            continue
        example = Example(cut[0], cut[1][0], trained[: len(cut[1][0])], row.number)
        if not any(example.trained):
            fit.drop("no trained token left after truncation")
            continue
        items.append(example)
    return fit.result(items, rows.source)


@_naming_the_source
def tokenise_preferences(
    rows: Rows,
    tokenizer: Any,
    *,
    max_length: int | None,
    truncation: Truncation = "drop",
    chat: ChatMode = "auto",
) -> Tokenised[Pair]:
    """Preferences as ids: both responses follow the same prompt ids and end in exactly one end token.

    Options as in `tokenise_demonstrations`; the limit holds for the longer of the two, and a cut prompt is
    cut alike for both. A row with the columns prompt_ids, chosen_ids and rejected_ids (as sampling gives
    them) is trained on those ids, bit for bit, and gets no end token that was not sampled. Pairs whose two
    rows are the same ids, also after truncation, have no gradient: dropped and counted.
    """
    encoder = _Encoder(tokenizer, chat)
    fit = _Fit(max_length, truncation, encoder.prefix)
    items = []
    for row in rows.rows:
        prompt, chosen, rejected = _sampled_ids(row) or encoder.pair(row)
        cut = fit.fit(prompt, [chosen, rejected])
        if cut is None:
            continue
        if cut[1][0] == cut[1][1]:
            fit.drop(
                "chosen and rejected have the same ids" + (" after truncation" if chosen != rejected else "")
            )
            continue
        items.append(Pair(cut[0], cut[1][0], cut[1][1], row.number))
    return fit.result(items, rows.source)


def _sampled_ids(row: Preference) -> tuple[list[int], list[int], list[int]] | None:
    """The ids a row carries, or None where it carries none; UsageError where they are not three lists of
    ids.
    """
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    found = [row.columns.get(name) for name in names]
    if all(ids is None for ids in found):
        return None
    for name, ids in zip(names, found, strict=True):
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise UsageError(
                f"Row {row.number}: {name} must be a list of token ids beside the other two of "
                f"{', '.join(names)}; "
                f"found {str(ids)[:60]}. Leave all three out to have the texts tokenised."
            )
    return found[0], found[1], found[2]  # type: ignore[return-value]


@_naming_the_source
def tokenise_prompts(
    rows: Rows,
    tokenizer: Any,
    *,
    max_length: int | None,
    max_new_tokens: int = 0,
    truncation: Truncation = "drop",
    chat: ChatMode = "auto",
) -> Tokenised[PromptIds]:
    """Prompts as the ids a model goes on from (a chat template's assistant header included).

    `text` is a string prompt as it was given, or the rendered messages; a messages prompt also reaches the
    reward as the column `messages`. Longer than max_length tokens, max_new_tokens of which are left to the
    response: cut from the left by "prompt-left", else dropped and counted.
    """
    encoder = _Encoder(tokenizer, chat)
    fit = _Fit(max_length, truncation, encoder.prefix, max_new_tokens)
    items = []
    for row in rows.rows:
        text = encoder.layout.prompt_text(row.prompt, row.number)
        ids = encoder.prompt(Spans([(text, False)], row.number))
        cut = fit.fit(ids, [])
        if cut is None:
            continue
        given = isinstance(row.prompt, str)
        columns = dict(row.columns) if given else {"messages": row.prompt, **row.columns}
        items.append(PromptIds(cut[0], row.prompt if given else text, columns, row.number))
    return fit.result(items, rows.source)


class _Encoder:
    """Text to ids for one tokenizer: span after span, the special tokens placed by hand."""

    def __init__(self, tokenizer: Any, chat: ChatMode) -> None:
        self.tokenizer = tokenizer
        self.prefix = _opening_ids(tokenizer)
        self.terminators = terminator_ids(tokenizer)
        self.layout = Layout(
            tokenizer, chat, tuple(tokenizer.convert_ids_to_tokens(sorted(self.terminators)))
        )

    def encode(self, text: str) -> list[int]:
        """A text's ids, no special token added."""
        return _ids(self.tokenizer, text, special=False)

    def prompt(self, spans: Spans) -> list[int]:
        """Ids of the first span, opened once as the tokenizer opens texts unless a template rendered it."""
        text = spans.texts[0][0]
        ids = self.encode(text)
        if not spans.rendered and ids[: len(self.prefix)] != self.prefix:
            ids = self.prefix + ids
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise UsageError(
                f"Row {spans.number}: the prompt is empty and the tokenizer has no beginning-of-text token, "
                "so nothing stands before the response's first token; give the row a prompt or set "
                "tokenizer.bos_token."
            )
        return ids

    def response(self, spans: Spans, prompt: list[int]) -> tuple[list[int], list[bool]]:
        """Ids of the spans after the first, and which are trained; ends in exactly one end token."""
        text, ids = spans.texts[0][0], list(prompt)
        trained = [False] * len(ids)
        for more, flag in spans.texts[1:]:
            new = self._extend(ids, text, more)
            ids += new
            trained += [flag] * len(new)
            text += more
        if len(ids) == len(prompt) or ids[-1] not in self.terminators:
            ids.append(self._eos(spans.number))
            trained.append(True)
        start = len(prompt)
        return ids[start:], trained[start:]

    def pair(self, row: Preference) -> tuple[list[int], list[int], list[int]]:
        """Ids of a preference: the prompt's, and after the same prompt those of chosen and rejected."""
        sides = [self.layout.answer(row.prompt, text, row.number) for text in (row.chosen, row.rejected)]
        prompt = self.prompt(sides[0])
        chosen, rejected = (self.response(spans, prompt)[0] for spans in sides)
        return prompt, chosen, rejected

    def _extend(self, ids: list[int], text: str, more: str) -> list[int]:
        """Ids of `more` after `text`, whose ids stay as they are.

        The joint tokenisation serves when it begins with `ids`; where a token would reach over the boundary,
        the two are tokenised apart. A sampler goes on from the prompt's own ids, so this is also what it
        sees.
        """
        known = len(ids)
        joint = self.encode(text + more)
        if ids[:known] != joint[:known] and self.prefix and ids[: len(self.prefix)] == self.prefix:
            joint = self.prefix + joint
        if joint[:known] == ids:
            return joint[known:]
        # apart, but not as the beginning of a text: some tokenizers put a space before that
        anchor = self.encode("\n")
        anchored = self.encode("\n" + more)
        return anchored[len(anchor) :] if anchor and anchored[: len(anchor)] == anchor else self.encode(more)

    def _eos(self, number: int) -> int:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise UsageError(
                f"Row {number}: the tokenizer has no end token, so a model could not learn where a response "
                "ends; set tokenizer.eos_token, or use a chat template that closes its turns."
            )
        return int(eos)


def terminator_ids(tokenizer: Any) -> set[int]:
    """Ids that can close a response: the end token and special tokens such as an end of turn.

    BOS, UNK and MASK cannot, unless one of them is the end token.
    """
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    eos = {tokenizer.eos_token_id} - {None}
    others = {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id}
    return ((added | set(tokenizer.all_special_ids)) - others) | eos


def _opening_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text (a BOS, usually, or nothing)."""
    bare, full = (_ids(tokenizer, "a", special=special) for special in (False, True))
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0) if bare else 0
    return full[:start]


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    """The tokenizer's ids as a plain list; UsageError where it returns anything else, None included."""
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise UsageError(f"The tokenizer returned {type(ids).__name__} {str(ids)[:60]} for a text, not ids.")
    return ids


class _Fit:
    """The length limit: cuts rows, or drops and counts them."""

    def __init__(
        self, max_length: int | None, truncation: Truncation, prefix: list[int], max_new_tokens: int = 0
    ) -> None:
        self.asked = f"max_length={max_length}"
        if max_length is not None and max_new_tokens:
            self.asked += f" (of which max_new_tokens={max_new_tokens} are the response's)"
            max_length -= max_new_tokens
        if max_length is not None and max_length < 2:
            raise UsageError(f"{self.asked} must leave at least 2 tokens to a row.")
        if truncation not in ("drop", "prompt-left", "response-right"):
            raise UsageError(f"truncation='{truncation}' must be drop, prompt-left or response-right.")
        self.max_length, self.truncation, self.prefix = max_length, truncation, prefix
        self.dropped: Counter[str] = Counter()
        self.truncated = 0

    def fit(self, prompt: list[int], responses: list[list[int]]) -> tuple[list[int], list[list[int]]] | None:
        """Prompt and responses within the limit, the same prompt for all, or None when the row is dropped."""
        longest = max(map(len, responses), default=0)
        if self.max_length is None or len(prompt) + longest <= self.max_length:
            return prompt, responses
        if self.truncation == "prompt-left":
            opening = len(self.prefix) if prompt[: len(self.prefix)] == self.prefix else 0
            keep = self.max_length - longest
            if keep > opening:  # the opening token stays where models expect it, at index 0
                self.truncated += 1
                return prompt[:opening] + prompt[len(prompt) - keep + opening :], responses
            self.drop("response longer than max_length")
        elif self.truncation == "response-right" and responses:
            room = self.max_length - len(prompt)
            if room > 0:
                self.truncated += 1
                return prompt, [response[:room] for response in responses]
            self.drop("prompt fills max_length")
        else:
            self.drop("longer than max_length")
        return None

    def drop(self, reason: str) -> None:
        """Count a dropped row."""
        self.dropped[reason] += 1

    def result(self, items: list[T], source: str) -> Tokenised[T]:
        """The items with the counts; UsageError when none is left."""
        if not items:
            why = (
                "; ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
                or "there were none"
            )
            raise UsageError(
                f"{source}: no row is left after tokenising with {self.asked}, "
                f"truncation={self.truncation} ({why}). Raise max_length or choose another truncation."
            )
        return Tokenised(items, dict(self.dropped), self.truncated)
