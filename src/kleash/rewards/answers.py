"""Where the answer stands in a response, and how two answers are compared as text; one pass over it each."""

from __future__ import annotations

import re
import unicodedata

BRACES = re.compile(
    r"\\{1,2}boxed\s*\{|\\.|[{}]", re.DOTALL
)  # an escaped brace, like any escape, is passed over
SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|q?quad)(?![A-Za-z])|[$~]")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
LOOSE_SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\})(?=\d{3}(?!\d))")


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` whose braces balance (the inner one of two); None without one."""
    opened: list[tuple[bool, int]] = []
    found: tuple[int, int] | None = None
    for match in BRACES.finditer(text):
        token = match[0]
        if token.endswith("{") and token != r"\{":
            opened.append((token != "{", match.end()))
        elif token == "}" and opened:
            is_box, start = opened.pop()
            if is_box and (found is None or start > found[0]):
                found = start, match.start()
    return None if found is None else text[found[0] : found[1]]


def tagged(text: str, tag: str = "answer") -> str | None:
    """The content of the last `<answer>…</answer>`, without outer white space; None without one."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside.partition(f"</{tag}>")[0].strip() if closed and opened else None


def marked(text: str) -> str | None:
    """The answer that a text marks as such: the last `\\boxed{…}`, else what follows the last `####`."""
    box = boxed(text)
    if box is not None:
        return box
    _, mark, after = text.rpartition("####")
    return after.strip() if mark else None


def ascii_digits(text: str) -> str:
    """Decimal digits of any script as 0 to 9, the minus sign as a hyphen, thousands without thin spaces."""
    plain = "".join(
        str(unicodedata.decimal(c)) if not c.isascii() and c.isdecimal() else c for c in text
    ).replace("\N{MINUS SIGN}", "-")
    return THOUSANDS.sub("", plain)


def normal(text: str) -> str:
    """An answer to compare by: case, spacing (TeX's too), dollar signs, `\\text{…}`, display fractions and a
    closing full stop do not count. Nothing is computed: 1/2 and 0.5 differ.
    """
    text = WRAPPED.sub(r"\1", SPACING.sub(" ", ascii_digits(text)))
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    return LOOSE_SPACE.sub("", " ".join(text.split())).rstrip(".").casefold()
