"""The run folder: whole files, honest refusals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kleash.errors import RunError, UsageError
from kleash.run import Run, create_run, free_name, open_run, reopen_run, write_text


def test_report_74_rows_are_utf8_and_come_back(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    rows = [{"step": 1, "text": "日本 🙂 \u2028 line"}, {"step": 2, "text": "a\nb"}]
    run.append("samples.jsonl", rows[:1])
    run.append("samples.jsonl", rows[1:])
    assert open_run(run.path).samples == rows


def test_report_67_a_line_cut_short_by_a_crash_is_no_row(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    run.append("metrics.jsonl", [{"step": 1}])
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert run.metrics == [{"step": 1}]


def test_truncate_forgets_later_steps_and_an_end_that_was_reached(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    run.append("metrics.jsonl", [{"step": n} for n in (1, 2, 3)])
    run.append("samples.jsonl", [{"step": 1}, {"step": 2, "measured": True}])
    run.truncate(2)
    assert run.metrics == [{"step": 1}, {"step": 2}] and run.samples == [{"step": 1}]


def test_nan_never_reaches_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        create_run(tmp_path / "run").append("metrics.jsonl", [{"step": 1, "loss": float("nan")}])


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        create_run(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        reopen_run(tmp_path / "absent")
    with pytest.raises(UsageError, match="holds none of"):
        open_run(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        open_run(tmp_path / "absent")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        create_run(tmp_path / "file" / "run")


def test_free_name_never_takes_an_existing_folder(tmp_path: Path) -> None:
    assert free_name(tmp_path, "dpo") == tmp_path / "dpo"
    (tmp_path / "dpo").mkdir()
    (tmp_path / "dpo-2").mkdir()
    assert free_name(tmp_path, "dpo") == tmp_path / "dpo-3"


def test_report_67_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "config.yaml", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"config\.yaml could not be written.*3 bytes"):
        write_text(tmp_path / "config.yaml", "new")
    assert (tmp_path / "config.yaml").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_absent_files_are_empty(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert (run.config, run.metrics, run.samples, run.evaluation, run.manifest) == ({}, [], [], {}, {})
