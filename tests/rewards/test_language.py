"""`language`: the share of a response that is in a language."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.errors import UsageError
from kleash.rewards import Language, load_reward, score_texts
from kleash.rewards.language import codes_of, sentences
from kleash.verifiers import pool

pytestmark = pytest.mark.skipif(find_spec("py3langid") is None, reason="needs the extra verifiers")
ENGLISH = "The cat sat on the mat and looked at the rain outside."
GERMAN = "Der Hund schläft heute den ganzen Tag auf dem Sofa."
CHINESE = "今天天气很好，我们去公园吧。"


def share(text: str, *codes: str) -> float | None:
    return Language(codes)(responses=[text])[0]


@pytest.mark.parametrize(("text", "code"), [(ENGLISH, "en"), (GERMAN, "de"), (CHINESE, "zh")])
def test_a_text_in_one_language(text: str, code: str) -> None:
    for wanted in ("en", "de", "zh"):
        assert share(text, wanted) == float(wanted == code)


def test_a_mixed_text_scores_by_its_share_of_letters() -> None:
    mixed = f"{ENGLISH} {GERMAN}\n{CHINESE}"
    shares = [share(mixed, code) for code in ("en", "de", "zh")]
    letters = [sum(map(str.isalpha, text)) for text in (ENGLISH, GERMAN, CHINESE)]
    assert shares == pytest.approx([count / sum(letters) for count in letters])
    assert share(mixed, "en", "de", "zh") == 1.0


def test_formulas_and_code_count_on_neither_side() -> None:
    assert share(f"{ENGLISH}\n$$x^2 + y^2 = z^2, \\quad 2 + 2 = 4$$\n", "en") == 1.0


@pytest.mark.parametrize("text", ["", "  \n", "42", "2 + 2 = 4", "?!", "👍"])
def test_a_text_without_letters_is_in_no_language(text: str) -> None:
    assert share(text, "en") == 0.0


def test_short_sentences_are_judged_together() -> None:
    assert sentences("I see. It is. The answer is four. No.") == ["I see. It is. The answer is four. No."]
    assert sentences("Yes.") == ["Yes."] and sentences(f"{ENGLISH} 42") == [ENGLISH]
    assert share("I think so. Yes, I do. The answer is four.", "en") == 1.0


def test_the_column_says_which_where_no_code_is_given() -> None:
    reward = load_reward("language")
    scores = reward(responses=[ENGLISH, GERMAN, GERMAN, ENGLISH], language=["en", "de-AT", "en", None])
    assert scores == [1.0, 1.0, 0.0, None]
    assert codes_of("EN, de_CH") == ("en", "de") and load_reward("language:de,en") == Language(("de", "en"))


def test_which_language_must_be_said() -> None:
    with pytest.raises(
        UsageError, match="^gold language: which? Name it, as in `language:en`".replace("?", r"\?")
    ):
        score_texts(load_reward("language", option="gold"), ["p"], ["r"])
    with pytest.raises(UsageError, match="^gold language: 'english' is not among the 1.. languages"):
        load_reward("language:english", option="gold")
    with pytest.raises(UsageError, match=r"'xx' \(column 'language' of response 2\) is not among"):
        load_reward("language")(responses=["a", "b"], language=["en", "xx"])


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pool.PACKAGES, "language", ("no_such_module", "py3langid"))
    with pytest.raises(UsageError, match="reward=language needs the package py3langid"):
        load_reward("language:en")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=120))
def test_no_text_breaks_it_and_every_score_is_a_share(text: str) -> None:
    score = share(text + "\ud800", "en")
    assert score is not None and 0.0 <= score <= 1.0
