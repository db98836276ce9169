"""Means, clustered errors and intervals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.measure import Estimate, clustered, t_interval
from kleash.measure.estimate import t_quantile


def test_equal_clusters_give_the_error_of_the_prompt_means() -> None:
    values, group = torch.tensor([1.0, 3.0, 4.0, 8.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    found = clustered(values, group)
    means = torch.tensor([2.0, 6.0, 1.0], dtype=torch.float64)
    assert found is not None
    assert found.mean == 3.0 and found.count == 6
    assert found.stderr == pytest.approx(float(means.std() / math.sqrt(3)))


def test_one_response_a_prompt_gives_the_plain_error() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 9.0])
    found = clustered(values, torch.arange(4))
    assert found is not None and found.stderr == pytest.approx(float(values.double().std() / 2))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12), st.integers(2, 5))
def test_repeating_each_response_adds_no_information(values: list[float], times: int) -> None:
    """Copies are not new evidence: naive errors would shrink by √times, clustered ones stay."""
    once = clustered(torch.tensor(values, dtype=torch.float64), torch.arange(len(values)))
    group = torch.arange(len(values)).repeat_interleave(times)
    many = clustered(torch.tensor(values, dtype=torch.float64).repeat_interleave(times), group)
    assert once is not None and many is not None and once.stderr is not None
    assert many.stderr == pytest.approx(once.stderr, abs=1e-12)


def test_unequal_clusters_against_the_formula() -> None:
    found = clustered(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([7, 7, 3]))
    assert found is not None
    assert found.stderr == pytest.approx(math.sqrt(2 / 1 * (3.0**2 + 3.0**2) / 9))


def test_missing_values_are_left_out_not_zero() -> None:
    found = clustered(torch.tensor([2.0, math.nan, 4.0]), torch.tensor([0, 0, 1]))
    assert found is not None and (found.mean, found.count) == (3.0, 2)
    assert clustered(torch.tensor([math.nan]), torch.tensor([0])) is None


def test_one_prompt_has_no_known_error() -> None:
    assert clustered(torch.tensor([1.0, 2.0]), torch.tensor([0, 0])) == Estimate(1.5, None, 2)
    assert str(Estimate(1.5, None, 2)) == "1.5" and str(Estimate(1.5, 0.25, 2)) == "1.5 ± 0.25"


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (5, 2.57058),
        (10, 2.22814),
        (30, 2.04227),
        (63, 1.99834),
        (10**6, 1.95997),
    ],
)
def test_t_quantile_against_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, rel=2e-3)
    assert t_quantile(0.025, freedom) == pytest.approx(-quantile, rel=2e-3)


def test_t_interval() -> None:
    found = t_interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.units == 3
    assert found.high - found.mean == pytest.approx(4.30265 / math.sqrt(3), rel=1e-4)
    assert t_interval([4.0]).low == -math.inf


def test_t_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(1000, 5, generator=generator).tolist()
    covered = sum(found.low <= 0.0 <= found.high for found in map(t_interval, draws)) / 1000
    assert covered == pytest.approx(0.95, abs=0.02)
