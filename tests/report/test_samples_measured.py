"""Where a run's end was measured, pages show those samples and not the training samples of the same step."""

from __future__ import annotations

from kleash.report.samples import final_rows


def row(step: int, prompt: str, **more: object) -> dict[str, object]:
    return {"step": step, "policy": "rlhf", "prompt": prompt, **more}


def test_measured_rows_stand_for_the_end_of_a_run() -> None:
    training = [row(10, "trained"), row(45, "trained")]
    measured = [row(45, "held out", measured=True)]
    assert final_rows(training + measured) == measured


def test_without_a_measurement_the_last_step_does() -> None:
    assert final_rows([row(10, "a"), row(45, "b")]) == [row(45, "b")]
