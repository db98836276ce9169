"""Policies to numbers: drift, proxy and gold, variety, length, calibration, and what they establish."""

import sys
from types import ModuleType
from typing import Any

from kleash.measure.calibration import Calibration, calibration, preference_calibration
from kleash.measure.compare import Difference, compare, difference
from kleash.measure.diversity import distinct_share, distinct_shares_matched
from kleash.measure.drift import rollout_kl, worst_token
from kleash.measure.estimate import Estimate, Interval, clustered, t_interval
from kleash.measure.evaluation import METRICS, Evaluation, Sample
from kleash.measure.extrapolation import Extrapolation, extrapolation
from kleash.measure.gold import Point, Separation, pairwise_agreement, points_from_metrics, separation
from kleash.measure.judges import Judges
from kleash.measure.length import LengthShare, length_share
from kleash.measure.policy import measure
from kleash.measure.rollouts import evaluate_rollouts
from kleash.measure.verdict import Statement, Thresholds, Verdict, verdict

__all__ = [
    "METRICS",
    "Calibration",
    "Difference",
    "Estimate",
    "Evaluation",
    "Extrapolation",
    "Interval",
    "Judges",
    "LengthShare",
    "Point",
    "Sample",
    "Separation",
    "Statement",
    "Thresholds",
    "Verdict",
    "calibration",
    "clustered",
    "compare",
    "difference",
    "distinct_share",
    "distinct_shares_matched",
    "evaluate_rollouts",
    "extrapolation",
    "length_share",
    "measure",
    "pairwise_agreement",
    "points_from_metrics",
    "preference_calibration",
    "rollout_kl",
    "separation",
    "t_interval",
    "verdict",
    "worst_token",
]


class _CallablePackage(ModuleType):
    """`kleash.measure` is this package and also a public function: calling either measures a policy."""

    def __call__(self, *args: Any, **options: Any) -> Evaluation:
        return measure(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
