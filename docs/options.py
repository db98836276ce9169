"""Write docs/options.md from the options in the code: `python docs/options.py`."""

from __future__ import annotations

from pathlib import Path

from kleash.config import Option, options
from kleash.methods import METHODS, TrainConfig

PAGE = Path(__file__).with_name("options.md")
HEADER = """# Options

Keys of a recipe, of `key=value` on the command line, and of `kleash.train`; `kleash train METHOD --options`
prints them too. This page is written by `python docs/options.py`.
"""


def page() -> str:
    """The whole page: shared options first, then what each method adds or sets otherwise."""
    shared = options(TrainConfig)
    known = {o.name: o for o in shared}
    parts = [HEADER, "## Every method\n\n" + table(shared)]
    for name, method in METHODS.items():
        own = [o for o in options(method.config) if o != known.get(o.name)]
        summary = method.summary[0].upper() + method.summary[1:]
        parts.append(f"## {name}\n\n{summary}. Rows: {method.kind}.\n\n{table(own)}")
    return "\n".join(parts)


def table(listed: list[Option]) -> str:
    """Options as a Markdown table."""
    rows = [f"| `{o.name}` | {default(o)} | {kind(o)} | {escaped(o.help)} |" for o in listed]
    return "\n".join(["| option | default | type | what |", "|---|---|---|---|", *rows]) + "\n"


def default(o: Option) -> str:
    """The default as it is written on the command line."""
    if o.required:
        return "required"
    if o.default is None:
        return "none"
    return f"`{str(o.default).lower() if isinstance(o.default, bool) else o.default}`"


def kind(o: Option) -> str:
    """Type and limits."""
    limits = [(o.minimum, "≥ {:g}"), (o.above, "> {:g}"), (o.maximum, "≤ {:g}")]
    return escaped(", ".join([o.type, *(text.format(value) for value, text in limits if value is not None)]))


def escaped(text: str) -> str:
    """Text inside a table's cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
