"""How much of a response is in a language, by py3langid: a small model that comes with the package."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kleash.errors import UsageError
from kleash.rewards.rules import Rule
from kleash.verifiers import require

SENTENCE = re.compile(r"(?<=[.!?;:])\s+|(?<=[。！？；])|\n+")
ENOUGH = 20
"""Bytes of letters in UTF-8 (seven Chinese ones). Shorter sentences are joined to the next before their
language is found: a word or two does not tell it."""
NO_LANGUAGE = "zxx"
"""What py3langid says of formulas, code and numbers."""


@dataclass(frozen=True)
class Language(Rule):
    """The share of the response's letters that stand in sentences of a language, 0 to 1; 0 without a letter.

    `codes`: ISO 639 codes, each of which will do; none: the row's column `language` says which. Sentences of
    formulas or code count on neither side. A sentence in two languages counts as one of them. No score where
    the row names no language.
    """

    codes: tuple[str, ...] = ()
    name: str = field(default="language", kw_only=True)

    def __post_init__(self) -> None:
        require("language", f"{self.option}={self.name}")
        for code in self.codes:
            self._known(code, "")

    def __call__(self, responses: Sequence[str], **columns: Any) -> list[float | None]:
        wanted = [self.codes] * len(responses) if self.codes else self._column(columns)
        return [
            in_languages(response, codes) if codes else None
            for response, codes in zip(responses, wanted, strict=True)
        ]

    def _column(self, columns: dict[str, Any]) -> list[tuple[str, ...]]:
        if "language" not in columns:
            raise UsageError(
                f"{self.option} language: which? Name it, as in `language:en`, or give the prompts a "
                "column 'language'."
            )
        rows = [codes_of(str(value or "")) for value in columns["language"]]
        for row, codes in enumerate(rows, start=1):
            for code in codes:
                self._known(code, f" (column 'language' of response {row})")
        return rows

    def _known(self, code: str, where: str) -> None:
        known = identifier().labels
        if code not in known:
            near = difflib.get_close_matches(code, known, n=3, cutoff=0.5)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise UsageError(
                f"{self.option} language: {code!r}{where} is not among the {len(known)} languages of "
                f"py3langid{hint}. They are named by ISO 639 codes: en, de, zh."
            )


def codes_of(text: str) -> tuple[str, ...]:
    """'en, de-AT' as ('en', 'de')."""
    parts = (re.split(r"[-_]", part.strip().lower())[0] for part in text.split(","))
    return tuple(part for part in parts if part)


@functools.cache
def identifier() -> Any:
    """py3langid's model, loaded once: half a second."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


def in_languages(text: str, codes: Sequence[str]) -> float:
    """The share of the text's letters in sentences of one of the languages; see Language."""
    inside = total = 0
    for sentence in sentences(text):
        found, _ = identifier().classify(sentence)
        if found != NO_LANGUAGE:
            count = len(letters(sentence))
            total += count
            inside += count if found in codes else 0
    return inside / total if total else 0.0


def sentences(text: str) -> list[str]:
    """Sentences and lines, short ones joined to the next, the last to the previous; none without letters."""
    pieces: list[str] = []
    gathered = ""
    for piece in SENTENCE.split(text):
        gathered = f"{gathered} {piece}" if gathered else piece
        if len(letters(gathered).encode("utf-8", "surrogatepass")) >= ENOUGH:
            pieces.append(gathered)
            gathered = ""
    if letters(gathered):
        pieces[-1:] = [f"{pieces[-1]} {gathered}" if pieces else gathered]
    return pieces


def letters(text: str) -> str:
    """The letters of a text, of any script."""
    return "".join(filter(str.isalpha, text))
