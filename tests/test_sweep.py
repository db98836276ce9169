"""The grid of a sweep and its summary over seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kleash.errors import UsageError
from kleash.run import Run
from kleash.sweep import check_grid, grid_points, point_name, split_grid, summarise


def finished(folder: Path, drift: float, gold: float | None = None) -> Run:
    """A run folder as far as a summary reads it."""
    folder.mkdir()
    found = {"drift": {"mean": drift, "stderr": 0.5, "count": 8}}
    found["gold"] = None if gold is None else {"mean": gold, "stderr": 0.1, "count": 8}
    (folder / "evaluation.json").write_text(json.dumps(found))
    (folder / "metrics.jsonl").write_text('{"step": 1, "seconds": 2.0}\n{"step": 2, "seconds": 4.0}\n')
    return Run(folder)


def test_every_combination_last_key_fastest() -> None:
    points = [point_name(p) for p in grid_points({"beta": ["0.1", "0.5"], "seed": ["0", "1"]})]
    assert points == ["beta=0.1,seed=0", "beta=0.1,seed=1", "beta=0.5,seed=0", "beta=0.5,seed=1"]


def test_a_path_in_a_point_makes_one_folder() -> None:
    assert point_name({"data": "a/b.jsonl"}) == "data=a-b.jsonl"


def test_values_with_commas_are_swept_and_others_fixed() -> None:
    fixed, grid = split_grid("dpo", {"beta": "0.1,0.5", "steps": "3"})
    assert (fixed, grid) == ({"steps": "3"}, {"beta": ["0.1", "0.5"]})


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({}, "nothing to sweep"),
        ({"beta": ["0.1", "0.1"]}, "beta=0.1,0.1"),
        ({"beta": ["0.1", ""]}, "empty"),
        ({"out": ["a", "b"]}, "out cannot be swept"),
    ],
)
def test_bad_input_grid(grid: dict[str, list[str]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_grid("dpo", grid)


def test_seeds_are_joined_by_mean_and_error_of_the_mean(tmp_path: Path) -> None:
    drifts = [1.0, 2.0, 6.0]
    runs = [
        ({"beta": "0.1", "seed": str(i)}, finished(tmp_path / str(i), drift))
        for i, drift in enumerate(drifts)
    ]
    (entry,) = summarise(runs)
    assert entry.label == "beta=0.1"
    assert entry.seconds == 4.0
    # Deviation of 1, 2, 6 is sqrt(7); over sqrt(3).
    assert entry.evaluation["drift"] == {"mean": 3.0, "stderr": pytest.approx(1.527525), "count": 3}


def test_one_seed_keeps_the_error_over_prompts(tmp_path: Path) -> None:
    (entry,) = summarise([({"beta": "0.1"}, finished(tmp_path / "a", 1.0))])
    assert entry.evaluation["drift"]["stderr"] == 0.5


def test_a_measure_that_one_seed_lacks_is_not_averaged_over_the_rest(tmp_path: Path) -> None:
    runs = [
        ({"seed": "0"}, finished(tmp_path / "a", 1.0, 2.0)),
        ({"seed": "1"}, finished(tmp_path / "b", 1.0)),
    ]
    (entry,) = summarise(runs)
    assert entry.label == "all seeds"
    assert "gold" not in entry.evaluation
