"""Transcripts of the form "\\n\\nHuman: … \\n\\nAssistant: …" (Anthropic's HH data) to messages and back."""

from __future__ import annotations

import re
from typing import Any

Message = dict[str, Any]

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(text: str) -> bool:
    """Whether a text opens as a transcript does (the blank line before the first speaker may be missing)."""
    return text.lstrip().startswith((HUMAN.strip(), ASSISTANT.strip())) and ASSISTANT in text


def shared_prompt(chosen: str, rejected: str) -> str:
    """The implicit prompt of two texts: their common beginning, cut back so that no answer is cut in two.

    Transcripts are cut after the last "\\n\\nAssistant:" both share; other texts before the last white space
    both share. "" where they share nothing. `prompt + rest` rebuilds each text exactly.
    """
    common = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    head = chosen[: min(len(chosen), len(rejected)) if common is None else common]
    if is_transcript(chosen):
        cut = head.rfind(ASSISTANT)
        return head[: cut + len(ASSISTANT)] if cut >= 0 else ""
    last = max((match.start() for match in re.finditer(r"\s+", head)), default=0)
    return head[:last]


def last_prompt(transcript: str) -> str:
    """A transcript up to and with its last "\\n\\nAssistant:"."""
    return transcript[: transcript.rindex(ASSISTANT) + len(ASSISTANT)]


def to_messages(transcript: str) -> list[Message]:
    """Turns of a transcript as messages, stripped; an open last "Assistant:" turn is left out."""
    parts = re.split(r"(?:^|\n\n)(Human|Assistant):", transcript)
    messages = [
        {"role": ROLES[who], "content": said.strip()}
        for who, said in zip(parts[1::2], parts[2::2], strict=True)
    ]
    if messages and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    if parts[0].strip():
        messages.insert(0, {"role": "system", "content": parts[0].strip()})
    return messages


def from_messages(messages: list[Message], open_turn: bool) -> str:
    """Messages as a transcript; with `open_turn` it ends in "\\n\\nAssistant:", for a model to go on from.

    A system message stands bare at the head, where `to_messages` looks for it. ValueError for a role that a
    transcript has no speaker for.
    """
    speakers = {"user": HUMAN + " ", "assistant": ASSISTANT + " "}
    text = ""
    for position, message in enumerate(messages):
        role = message["role"]
        if role not in speakers and (role != "system" or position):
            raise ValueError(f"turn {position + 1} is by {role!r}")
        text += speakers.get(role, "") + message["content"]
    return text + ASSISTANT if open_turn else text
