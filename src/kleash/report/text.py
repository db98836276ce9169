"""Numbers and untrusted text as they appear on a page or in the terminal."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ABSENT = "–"
ROUNDING = 1e-4  # nats of exact KL below 0 that come of summing in float32
MINUS = "\u2212"

# Characters that would be invisible, would reorder the page around them, or cannot be written as UTF-8:
# controls other than tab and newline, bidirectional and zero-width formatting, line separators, surrogates.
# The zero-width joiners U+200C and U+200D stay: emoji and several scripts are spelled with them.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""`text` with unsafe characters spelled out, e.g. ␛ or "\ud83d"; the result encodes as UTF-8.

    Surrogates that form a pair are joined first, as JSON writers in other languages leave them.
    """
    if not _UNSAFE.search(text):
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return _UNSAFE.sub(_spell_out, joined)


def _spell_out(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)  # control pictures: ␀ ␛ …
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def shorten(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, not cut inside a combining sequence."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    end = width - 1
    while end > 1 and unicodedata.combining(line[end]):
        end -= 1
    return line[:end].rstrip() + "…"


@dataclass(frozen=True)
class Figure:
    """A measured mean with its standard error (None for a single prompt) and number of samples."""

    mean: float
    stderr: float | None = None
    count: int | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval mean ± 1.96 se; empty (mean, mean) without a standard error."""
        half = 1.96 * (self.stderr or 0.0)
        return self.mean - half, self.mean + half


def finite(value: Any) -> float | None:
    """`value` as a finite float, or None for anything else (booleans, text, NaN, infinity)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def figure(value: Any) -> Figure | None:
    """A Figure from a number, or from what has `mean`, `stderr` and `count`; None when not measured."""
    number = finite(value)
    if number is not None:
        return Figure(number)
    get = value.get if isinstance(value, Mapping) else lambda name: getattr(value, name, None)
    mean = finite(get("mean"))
    if mean is None:
        return None
    count = finite(get("count"))
    return Figure(mean, finite(get("stderr")), None if count is None else int(count))


def nonnegative(drift: float) -> float:
    """A drift for reading: exact KL is never negative, so what rounding left below 0 reads 0. More stays."""
    return 0.0 if -ROUNDING < drift < 0 else drift


def format_number(value: Any, decimals: int | None = None) -> str:
    """A number for reading: about three significant digits, a true minus sign, "–" when there is none."""
    number = finite(value)
    if number is None:
        return ABSENT
    if decimals is None:
        size = abs(number)
        if size != 0 and size < 0.001:
            return f"{number:.1e}".replace("-", MINUS)
        decimals = 0 if size >= 1000 or number == int(number) else 1 if size >= 100 else 2 if size >= 1 else 3
    text = f"{number:,.{decimals}f}"
    if text.strip("-0.,") == "":
        text = text.lstrip("-")  # never a negative zero
    return text.replace("-", MINUS)


def format_figure(value: Figure | None) -> tuple[str, str]:
    """Mean and standard error as text, to the error's first digit (its second where that is 1 or 2)."""
    if value is None:
        return ABSENT, ""
    if not value.stderr:
        return format_number(value.mean), ("± 0" if value.stderr == 0 else "")
    exponent = math.floor(math.log10(value.stderr))
    digits = 2 if value.stderr / 10**exponent < 3 else 1
    decimals = min(4, max(0, digits - 1 - exponent))
    return format_number(value.mean, decimals), f"± {format_number(value.stderr, decimals)}"


def format_seconds(value: Any) -> str:
    """A duration: "48 s", "3 min 05 s", "1 h 12 min"."""
    number = finite(value)
    if number is None:
        return ABSENT
    if number < 60:
        return f"{number:.1f} s" if number < 10 else f"{number:.0f} s"
    whole = round(number)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_value(value: Any) -> str:
    """A configuration value in one line: yes/no for booleans, lists and mappings written out."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}".replace("-", MINUS) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value).replace("-", MINUS)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value)) or "none"
    return str(value)
