"""Calibration of preferences."""

from __future__ import annotations

import math

import pytest
import torch

from kleash.measure import calibration, preference_calibration


def test_by_hand() -> None:
    found = calibration(torch.tensor([0.9, 0.9, 0.2, 0.2]), torch.tensor([1, 0, 0, 0]), bins=5)
    assert found.error == pytest.approx(0.3)
    assert found.brier == pytest.approx((0.01 + 0.81 + 0.04 + 0.04) / 4)
    assert [(b.confidence, b.right, b.count) for b in found.bins] == [
        (pytest.approx(0.2), 0.0, 2),
        (pytest.approx(0.9), 0.5, 2),
    ]
    assert found.count == 4


def test_margins_that_come_true_as_often_as_they_say_are_calibrated() -> None:
    margin = math.log(4)  # σ = 0.8
    found = preference_calibration(torch.tensor([margin] * 8 + [-margin] * 2))
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert len(found.bins) == 1 and found.bins[0].right == pytest.approx(0.8)


def test_a_sure_and_wrong_judge_is_not() -> None:
    found = preference_calibration(torch.tensor([-9.0, -9.0, 9.0, 9.0]))
    assert found.error == pytest.approx(0.5, abs=1e-3) and found.brier == pytest.approx(0.5, abs=1e-3)
