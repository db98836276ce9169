"""The beta dial: the script that the page carries computes what kleash.functional computes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kleash.functional import optimal_policy
from kleash.report import write_dial

REF, PROXY, GOLD = [0.80, 0.19, 0.01], [0.0, 1.0, 2.0], [0.0, 1.0, -1.0]


class Dial:
    """The dial's model script, taken from a written page and run by V8."""

    def __init__(self, page: Path) -> None:
        racer = pytest.importorskip("py_mini_racer", reason="mini-racer runs the page's script (extra `dev`)")
        scripts = re.findall(r"<script>(.*?)</script>", page.read_text(encoding="utf-8"), re.S)
        self.engine = racer.MiniRacer()
        self.engine.eval(next(script for script in scripts if "const dial" in script))

    def __call__(self, expression: str) -> Any:
        return json.loads(self.engine.eval(f"JSON.stringify({expression})"))


@pytest.fixture(scope="module")
def dial(tmp_path_factory: pytest.TempPathFactory) -> Dial:
    return Dial(write_dial(tmp_path_factory.mktemp("dial") / "dial.html"))


@pytest.mark.parametrize("beta", [0.1, 0.25, 0.3396, 0.65901, 1.0, 3.0, 10.0])
def test_page_agrees_with_optimal_policy(dial: Dial, beta: float) -> None:
    ref, proxy = torch.tensor(REF, dtype=torch.float64), torch.tensor(PROXY, dtype=torch.float64)
    probs, log_z = optimal_policy(ref, proxy, beta)
    page = dial(f"dial.solve({beta})")
    assert page["pi"] == pytest.approx(probs.tolist(), abs=1e-12)
    assert page["logZ"] == pytest.approx(float(log_z), abs=1e-12)
    assert page["proxy"] == pytest.approx(float(probs @ proxy), abs=1e-12)
    assert page["gold"] == pytest.approx(float(probs @ torch.tensor(GOLD, dtype=torch.float64)), abs=1e-12)
    assert page["kl"] == pytest.approx(float((probs * (probs / ref).log()).sum()), abs=1e-12)
    objective = page["proxy"] - beta * page["kl"]
    assert objective == pytest.approx(beta * page["logZ"], abs=1e-12)  # the optimum's value


@pytest.mark.parametrize(
    ("beta", "proxy", "gold", "kl"),
    [(1, 0.478, 0.318, 0.148), (10, 0.229, 0.193, 0.001), (0.1, 1.999, -0.998, 4.596)],
)
def test_system_004_52_readouts_and_path(
    dial: Dial, beta: float, proxy: float, gold: float, kl: float
) -> None:
    now = dial(f"dial.solve({beta})")
    assert [round(now[key], 3) for key in ("proxy", "gold", "kl")] == [proxy, gold, kl]
    path = dial("dial.path()")
    assert (
        len(path) == 121 and path[0]["beta"] == pytest.approx(10) and path[-1]["beta"] == pytest.approx(0.1)
    )
    assert all(a["proxy"] < b["proxy"] and a["kl"] < b["kl"] for a, b in zip(path, path[1:], strict=False))


def test_system_004_53_gold_peaks_at_beta_0_659_and_is_flat_there(dial: Dial) -> None:
    best = dial("dial.peak()")
    assert best["beta"] == pytest.approx(0.65901, abs=1e-5)
    assert best["gold"] == pytest.approx(0.351305, abs=1e-6) and best["kl"] == pytest.approx(0.4098, abs=1e-4)
    assert dial("dial.flat()") == [0.63, 0.69]


def test_system_004_54_gold_falls_below_its_start_and_below_zero(dial: Dial) -> None:
    assert dial("dial.start") == pytest.approx(0.18)
    start = dial("dial.fallsTo(dial.start)")
    assert start["beta"] == pytest.approx(0.3997, abs=5e-5) and start["kl"] == pytest.approx(1.348, abs=5e-4)
    assert dial("dial.fallsTo(0)")["beta"] == pytest.approx(0.3396, abs=5e-5)


def test_the_page_is_small_and_fetches_nothing(tmp_path: Path) -> None:
    page = write_dial(tmp_path / "dial.html").read_text(encoding="utf-8")
    assert len(page) < 60_000 and "default-src &#39;none&#39;" in page and "Predict first" in page
    assert not re.search(r'(src|href)="(?!#)', page)


def test_the_page_states_the_numbers_that_the_script_uses(dial: Dial, tmp_path: Path) -> None:
    page = write_dial(tmp_path / "dial.html").read_text(encoding="utf-8")
    rows = re.findall(r'<th scope="row">(.*?)</th>' + r'<td class="num">(.*?)</td>' * 3, page)
    numbers = [[float(cell.replace("−", "-")) for cell in cells] for _, *cells in rows]
    assert [name for name, *_ in rows] == dial("dial.names")
    assert numbers == [list(row) for row in zip(dial("dial.ref"), PROXY, GOLD, strict=True)]
