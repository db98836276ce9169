"""The beta dial: three responses, a reward that is wrong about one, and the optimal policy at every beta.

One self-contained page (seed 004, section 7). Its numbers are computed by `templates/dial-model.js`; the
tests run that script and compare it with `kleash.functional.optimal_policy`.
"""

from __future__ import annotations

from pathlib import Path

from kleash.report.html import asset, render, write_page


def write_dial(out: Path) -> Path:
    """Write the dial at `out` (a file, or a folder that gets dial.html: report.html may be a run's there) and
    return its path.
    """
    out = Path(out)
    scripts = [asset("dial-model.js"), asset("dial.js")]
    page = render("dial.html.j2", scripts, kicker="KLeash", title="The β dial", sections=[], notes=[])
    return write_page(page, out / "dial.html" if out.is_dir() else out)
