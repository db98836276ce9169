"""How far a policy's text lies from the text its reward model was fitted to (seed 004, section 1: trusted
only there).
"""

from __future__ import annotations

from dataclasses import dataclass

from kleash.measure.evaluation import Evaluation, Sample


@dataclass(frozen=True)
class Extrapolation:
    """Against samples of the model that wrote the reward model's training text.

    surprise, surprise_text: mean −log p_ref a token of the run's samples and of that model's own, nats.
    outside: share of the run's responses whose surprise lies beyond the central 98 % of its own; 2 % is what
    an unmoved policy shows. There the reward model's score is extrapolation.
    """

    surprise: float
    surprise_text: float
    outside: float


def extrapolation(run: Evaluation, text: Evaluation) -> Extrapolation | None:
    """`text` is an evaluation of the reference itself, where it wrote the training responses; None without
    samples.
    """
    ours, theirs = (sorted(map(surprise, evaluation.samples)) for evaluation in (run, text))
    if not ours or not theirs:
        return None
    low, high = (theirs[round(share * (len(theirs) - 1))] for share in (0.01, 0.99))
    outside = sum(not low <= value <= high for value in ours) / len(ours)
    return Extrapolation(sum(ours) / len(ours), sum(theirs) / len(theirs), outside)


def surprise(sample: Sample) -> float:
    """Mean −log p_ref of a response's tokens, nats a token."""
    return -sum(sample.logp_ref) / len(sample.logp_ref)
