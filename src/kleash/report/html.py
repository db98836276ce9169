"""Templates, scripts and styles -> one self-contained file: escaped, and forbidden to fetch anything."""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import altair
import jinja2
import vl_convert
from markupsafe import Markup

from kleash.errors import RunError
from kleash.report import text
from kleash.report.table import format_percent


def asset(name: str) -> str:
    """The text of a file of `report/templates`."""
    return (files("kleash.report") / "templates" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def chart_library() -> str:
    """Vega, Vega-Lite and vega-embed as one script, from the vl-convert package: no network, 0.9 MB."""
    version = ".".join(altair.SCHEMA_VERSION.split(".")[:2])
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version))


def inline_script(source: str) -> tuple[Markup, str]:
    """A script ready to stand between <script> tags, and its hash for the page's Content-Security-Policy.

    The hash lets these scripts run and no other: model text would not run even if it were not escaped.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")  # as the HTML parser does before it hashes
    if "</script" in source.lower() or "<!--" in source:
        raise ValueError("a script of the page would end its own element early")
    digest = base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")
    return Markup(source), f"'sha256-{digest}'"  # noqa: S704 - our own scripts, never model text


def environment() -> jinja2.Environment:
    """Jinja2 with autoescape everywhere; text that cannot be shown or encoded is spelled out first."""
    templates = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    templates.filters.update(
        number=text.format_number,
        seconds=text.format_seconds,
        value=text.format_value,
        percent=format_percent,
        figure=text.format_figure,
    )
    return templates


def _finalize(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return text.visible(value)
    return value


def render(template: str, scripts: list[str], **context: Any) -> str:
    """The page as text. `scripts` are our own sources; `context` may hold untrusted text anywhere."""
    pairs = [inline_script(source) for source in scripts]
    allowed = " ".join(digest for _, digest in pairs)
    policy = (
        f"default-src 'none'; script-src {allowed}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = environment().get_template(template)
    style = Markup(asset("style.css"))  # noqa: S704 - our own file
    return page.render(
        style=style, scripts=[source for source, _ in pairs], security_policy=policy, **context
    )


def write_page(page: str, out: Path) -> Path:
    """Write the page at `out` (a file, or a folder that gets report.html): complete, or not at all."""
    target = out / "report.html" if out.is_dir() else out
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".report-", suffix=".html")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(page.encode("utf-8"))
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"Cannot write the page {target}: {error.strerror or error}. Give another place, or make room."
        ) from error
    return target
