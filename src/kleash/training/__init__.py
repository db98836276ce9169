"""Training: one loop for every method, the checks before it and the measurement after it."""

from kleash.training.api import check, find_method, train
from kleash.training.interrupt import Interrupted
from kleash.training.preflight import CheckReport, Finding

__all__ = ["CheckReport", "Finding", "Interrupted", "check", "find_method", "train"]
