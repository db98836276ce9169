"""The openings: enough of them, disjoint, short, and neutral under the gold rule."""

from __future__ import annotations

from kleash.lab.openings import EVALUATION_OPENINGS, TRAINING_OPENINGS
from kleash.lab.rule import explain

ALL = TRAINING_OPENINGS + EVALUATION_OPENINGS


def test_sixty_four_each_and_all_different() -> None:
    assert len(TRAINING_OPENINGS) == len(EVALUATION_OPENINGS) == 64
    assert len({opening.lower() for opening in ALL}) == 128


def test_four_to_nine_words_with_no_space_at_the_ends() -> None:
    for opening in ALL:
        assert 4 <= len(opening.split()) <= 9, opening
        assert opening == " ".join(opening.split())
        assert opening[-1] not in ".!?"


def test_no_opening_holds_a_word_of_the_rule() -> None:
    assert {opening: explain(opening).list_words for opening in ALL if explain(opening).list_words} == {}
