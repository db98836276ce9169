"""The pages in a real browser: charts drawn and tokens coloured under the page's own security policy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kleash.report import write_dial, write_lab_report

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")]


def drawn(page: Path, profile: Path) -> str:
    """The page's elements after its scripts have run."""
    options = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    )
    command = [str(BROWSER), *options.split(), f"--user-data-dir={profile}", "--virtual-time-budget=5000"]
    return subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_lab_page_draws_every_chart_and_every_token(lab_dir: Path, tmp_path: Path) -> None:
    path = lab_dir / "rlhf" / "samples.jsonl"
    path.write_text(path.read_text().replace('"tokens": [" ', '"tokens": ["<img src=x> '))
    page = drawn(write_lab_report(lab_dir), tmp_path / "profile")
    page = page[page.index("<main") : page.index("</main>")]
    assert "could not be drawn" not in page
    assert page.count("<svg") == page.count("data-chart=") > 10
    assert page.count('class="token"') == 5 * 4 * 24  # five openings, four policies, 24 tokens
    assert page.count("color-mix") > 300
    assert "&lt;img src=x&gt;" in page and "<img" not in page


def test_dial_reads_out_its_numbers(tmp_path: Path) -> None:
    page = drawn(write_dial(tmp_path / "dial.html"), tmp_path / "profile")
    assert '<span id="at-beta">1.00</span>' in page and '<strong id="at-proxy">0.478</strong>' in page
    assert '<strong id="at-gold">predict first</strong>' in page
