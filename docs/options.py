"""Write docs/options.md from the options in the code: `python docs/options.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kleash.config import Option, options
from kleash.methods import METHODS, TrainConfig
from kleash.methods.group import GroupConfig
from kleash.methods.online import OnlineConfig
from kleash.methods.policy_gradient import PolicyConfig

PAGE = Path(__file__).with_name("options.md")
HEADER = """# Options

Keys of a recipe, of `key=value` on the command line, and of `kleash.train`; `kleash train METHOD --options`
prints those of one method in full. This page is written by `python docs/options.py`.
"""
SHARED: dict[type[TrainConfig], str] = {
    TrainConfig: "Every method",
    OnlineConfig: "Methods that sample",
    PolicyConfig: "Policy gradients",
    GroupConfig: "Group-relative methods",
}
"""What several methods have in common, each adding to the one before."""


def page() -> str:
    """The whole page: shared options first, then what each method adds or sets otherwise."""
    parts = [f"## {title}\n\n{added(kind)}" for kind, title in SHARED.items()]
    for method in METHODS.values():
        summary = method.summary[0].upper() + method.summary[1:]
        parts.append(f"## {method.name}\n\n{summary}. Rows: {method.kind}.\n\n{added(method.config)}")
    return "\n".join([HEADER, *parts])


def added(config: type) -> str:
    """What a config class adds to the options of the section it builds on, and what it sets otherwise."""
    base = next((kind for kind in config.__mro__[1:] if kind in SHARED), None)
    if base is None:
        return table(options(config))
    known = {o.name: o for o in options(base)}
    changed, new = [], []
    for o in options(config):
        old = known.get(o.name)
        if old is None or replace(old, default=o.default) != o:
            new.append(o)
        elif old != o:
            changed.append(f"`{o.name}={o.written_default}`")
    said = f"As under *{SHARED[base]}*" + (f", with {', '.join(changed)}" if changed else "")
    return f"{said}, and:\n\n{table(new)}" if new else f"{said}.\n"


def table(listed: list[Option]) -> str:
    """Options as a Markdown table."""
    rows = [f"| `{o.name}` | {default(o)} | {kind(o)} | {escaped(o.help)} |" for o in listed]
    return "\n".join(["| option | default | type | what |", "|---|---|---|---|", *rows]) + "\n"


def default(o: Option) -> str:
    """The default as it is written on the command line."""
    return o.written_default if o.required or o.default is None else f"`{o.written_default}`"


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
