"""Preference rows that carry the ids they were sampled with are trained on those ids (report 25's kind of
fault).
"""

from __future__ import annotations

from typing import Any

import pytest

from kleash.data import read_rows, tokenise_preferences
from kleash.errors import UsageError
from kleash.lab.tiny import _tokenizer

ROW = {"prompt": "On Sunday", "chosen": " good", "rejected": " bad"}


def tokenised(**ids: Any) -> Any:
    rows = read_rows([{**ROW, **ids}], "preferences")
    return tokenise_preferences(rows, _tokenizer(), max_length=32).items[0]


def test_ids_of_a_row_are_kept_bit_for_bit_without_an_added_end_token() -> None:
    pair = tokenised(prompt_ids=[5, 6], chosen_ids=[9, 8, 7], rejected_ids=[9, 9])
    assert (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) == ([5, 6], [9, 8, 7], [9, 9])


def test_without_ids_the_texts_are_tokenised_and_ended() -> None:
    pair = tokenised()
    assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == _tokenizer().eos_token_id


@pytest.mark.parametrize("wrong", [None, [], [1.5], "12", [True]])
def test_a_partial_or_wrong_set_of_ids_is_named(wrong: Any) -> None:
    with pytest.raises(UsageError, match="row 1: chosen_ids must be a list of token ids"):
        tokenised(prompt_ids=[5], chosen_ids=wrong, rejected_ids=[7])
