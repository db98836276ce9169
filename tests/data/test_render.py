"""Ids back to marked text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.data.render import render_tokens

TOKENIZER: dict[str, Any] = {}


def test_each_token_is_a_piece_with_its_flag(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(merges=[("a", "b")])
    ids = tokenizer("<s>abc</s>")["input_ids"]
    assert render_tokens(ids, [False, False, True, True], tokenizer) == [
        ("<s>", False),
        ("ab", False),
        ("c", True),
        ("</s>", True),
    ]


@given(text=st.text(min_size=1, max_size=30), split=st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_whole_text(make_tokenizer: Callable[..., Any], text: str, split: int) -> None:
    tokenizer = TOKENIZER.setdefault("it", make_tokenizer())
    first, second = (
        text[:split],
        text[split:],
    )  # the trained boundary lies between characters, as in any real row
    ids = [tokenizer(part)["input_ids"] if part else [] for part in (first, second)]
    pieces = render_tokens(ids[0] + ids[1], [False] * len(ids[0]) + [True] * len(ids[1]), tokenizer)
    assert "".join(piece for piece, trained in pieces if not trained) == first
    assert "".join(piece for piece, trained in pieces if trained) == second


def test_bytes_of_one_character_stay_together(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("é🙂漢!")["input_ids"]
    assert len(ids) == 2 + 4 + 3 + 1
    assert render_tokens(ids, [True] * len(ids), tokenizer) == [(c, True) for c in "é🙂漢!"]


def test_a_character_cut_by_truncation_shows_as_replacement(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("a🙂")["input_ids"][:-1]
    assert render_tokens(ids, [False] + [True] * 3, tokenizer) == [("a", False), ("\ufffd", True)]


def test_spaces_of_sentencepiece_like_tokenizers_stay(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer("metaspace")
    ids = tokenizer("ab cd")["input_ids"]
    pieces = render_tokens(ids, [False] * 2 + [True] * (len(ids) - 2), tokenizer)
    assert "".join(text for text, _ in pieces) == "ab cd"
    assert [text for text, trained in pieces if trained][0] == " c"


def test_lengths_must_agree(make_tokenizer: Callable[..., Any]) -> None:
    assert render_tokens([], [], make_tokenizer()) == []
    with pytest.raises(ValueError, match="2 ids but 1"):
        render_tokens([1, 2], [True], make_tokenizer())
