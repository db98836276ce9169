"""How a conversation is laid out as text: spans in order, each trained or not.

Every boundary is the length of a rendered prefix of the conversation. A template whose rendering of a prefix
is not a prefix of its rendering of the whole has no such boundaries, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from kleash.data.rows import Text
from kleash.data.transcripts import Message, from_messages, is_transcript, to_messages
from kleash.errors import UsageError

ChatMode = Literal["auto", "template", "plain"]
Render = Callable[[list[Message], bool, int], str]


@dataclass(frozen=True)
class Spans:
    """Consecutive texts of one row, trained or not, the prompt first; `rendered` by a chat template."""

    texts: list[tuple[str, bool]]
    number: int
    rendered: bool = False


class Layout:
    """Lays out rows for one tokenizer and one chat mode; `ends` are the texts of its end-of-turn tokens."""

    def __init__(self, tokenizer: Any, chat: ChatMode, ends: tuple[str, ...]) -> None:
        if chat not in ("auto", "template", "plain"):
            raise UsageError(f"chat='{chat}' must be auto, template or plain.")
        self.tokenizer, self.chat, self.ends = tokenizer, chat, ends

    def prompt_text(self, prompt: Text, number: int) -> str:
        """The text a response follows."""
        if isinstance(prompt, str) and self.chat != "template":
            return prompt
        return self._render(self._messages(prompt), True, number)

    def answer(self, prompt: Text, answer: Text, number: int) -> Spans:
        """A prompt and one trained answer."""
        return self.demonstration(prompt, answer, number, last_only=True)

    def demonstration(self, prompt: Text, completion: Text, number: int, last_only: bool) -> Spans:
        """A prompt and its completion, of which every assistant turn is trained or only the last."""
        if isinstance(prompt, str) and isinstance(completion, str):
            if self.chat != "template":
                return Spans([(prompt, False), (completion, True)], number)
            completion = [{"role": "assistant", "content": completion.strip()}]
        before, after = self._messages(prompt), self._messages(completion)
        turns = [len(before) + i for i, message in enumerate(after) if message["role"] == "assistant"]
        spans = self._spans(before + after, turns[-1:] if last_only else turns, number)
        return Spans(spans, number, rendered=self.chat != "plain")

    def _messages(self, text: Text) -> list[Message]:
        if not isinstance(text, str):
            return text
        return to_messages(text) if is_transcript(text) else [{"role": "user", "content": text}]

    def _spans(self, messages: list[Message], turns: list[int], number: int) -> list[tuple[str, bool]]:
        """The conversation cut at every trained turn: [before, turn, between, turn, …]."""
        spans: list[tuple[str, bool]] = []
        done = ""
        for turn in turns:
            opening = self._render(messages[:turn], True, number)
            closed = self._render(messages[: turn + 1], False, number)
            spans.append((_beyond(opening, done, number, turn), False))
            text = self._to_end_token(_beyond(closed, opening, number, turn))
            if not text.strip():
                raise UsageError(f"Row {number}: the chat template prints nothing for turn {turn + 1}.")
            spans.append((text, True))
            done = opening + text
        return spans

    def _to_end_token(self, turn: str) -> str:
        """A rendered turn without the white space a template prints after its end-of-turn token."""
        bare = turn.rstrip()
        return bare if self.ends and bare.endswith(self.ends) else turn

    def _render(self, messages: list[Message], open_turn: bool, number: int) -> str:
        if self.chat == "plain":
            return self._transcript(messages, open_turn, number)
        if not self.tokenizer.chat_template:
            raise UsageError(
                f"Row {number} holds messages, but the tokenizer has no chat template: use an "
                "instruction-tuned model, set tokenizer.chat_template, or choose chat=plain to write turns "
                "as a Human/Assistant transcript."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=open_turn
            )
        except (TemplateError, ValueError) as error:
            roles = [message["role"] for message in messages]
            raise UsageError(
                f"Row {number}: the chat template refuses messages of roles {roles}: {error}."
            ) from error
        if not isinstance(text, str):
            raise UsageError(f"The chat template rendered {type(text).__name__}, not text.")
        return text

    def _transcript(self, messages: list[Message], open_turn: bool, number: int) -> str:
        try:
            return from_messages(messages, open_turn)
        except ValueError as error:
            raise UsageError(
                f"Row {number}: {error}, and chat=plain writes a transcript of user and assistant turns, "
                "with at most a system message before them. Mend the role, or use a model whose template "
                "has it."
            ) from error


def _beyond(text: str, start: str, number: int, turn: int) -> str:
    """What `text` has after `start`; UsageError showing both where `text` does not begin with it."""
    if text.startswith(start):
        return text[len(start) :]
    at = next(
        (i for i, (a, b) in enumerate(zip(text, start, strict=False)) if a != b), min(len(text), len(start))
    )
    raise UsageError(
        f"Row {number}: the chat template is not append-only: up to turn {turn + 1} it renders "
        f"{text[max(0, at - 20) : at + 40]!r} where it rendered {start[max(0, at - 20) : at + 40]!r} before, "
        "so no position separates prompt from response (templates that drop reasoning from earlier turns do "
        "this). Train on the last turn alone (train_on=last), or use a template that keeps earlier turns as "
        "they are."
    )
