"""Ids back to text, token by token, for pages and `kleash check` to mark which tokens are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def render_tokens(ids: Sequence[int], trained: Sequence[bool], tokenizer: Any) -> list[tuple[str, bool]]:
    """The text of a row in pieces, each with its trained flag; special tokens show, pieces join to the whole.

    A piece is one token, or the few whose bytes make up one character: those of a byte-level tokenizer cannot
    be shown alone. A character that the trained boundary divides shows as U+FFFD on both sides.
    """
    if len(ids) != len(trained):
        raise ValueError(f"{len(ids)} ids but {len(trained)} trained flags")
    pieces: list[tuple[str, bool]] = []
    before: list[int] = []  # the previous piece: some decoders treat the first token of a text differently
    group: list[int] = []
    for i, token in enumerate(ids):
        group.append(token)
        text = _text_after(before, group, tokenizer)
        at_end = i + 1 == len(ids) or trained[i + 1] != trained[i]
        if (
            text.endswith("\ufffd") and not at_end and len(group) < 4
        ):  # UTF-8 takes at most 4 bytes a character
            continue
        pieces.append((text, bool(trained[i])))
        before, group = group, []
    return pieces


def _text_after(before: list[int], group: list[int], tokenizer: Any) -> str:
    """What `group` adds to the text of `before`."""
    head, both = (_decode(tokenizer, ids) for ids in (before, before + group))
    return both[len(head) :] if both.startswith(head) else _decode(tokenizer, group)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
    return str(text)
