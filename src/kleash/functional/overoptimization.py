"""The curve of the true reward against drift: it rises, peaks and falls (Gao 2023, https://arxiv.org/abs/2210.10760)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ._checks import check_choice, check_floats

Form = Literal["rl", "bon"]


@dataclass(frozen=True)
class OveroptimizationFit:
    """gold(d) = d·(α - β·log d) ("rl") or d·(α - β·d) ("bon"), with d = √KL.

    `r_squared` is 1 - (residual / total sum of squares). `peak_kl` and `peak_gold` say where the curve
    turns and how high; both None where it has no maximum at d > 0. A peak beyond the measured range is an
    extrapolation.
    """

    form: Form
    alpha: float
    beta: float
    r_squared: float
    peak_kl: float | None
    peak_gold: float | None

    def predict(self, kl: Tensor) -> Tensor:
        """The fitted gold at each KL (nats), float64."""
        return _design(kl, self.form) @ torch.tensor([self.alpha, self.beta], dtype=torch.float64)


def fit_overoptimization(kl: Tensor, gold: Tensor, form: Form = "rl") -> OveroptimizationFit:
    """Least squares of gold on the two functional forms of Gao et al., which are linear in α and β.

    kl (K,) in nats, gold (K,) *relative to the reference's own gold*, so that the curve starts at 0 where
    KL is 0. "rl": d·(α - β·log d), peak at d = e^(α/β - 1). "bon" (best of n): d·(α - β·d), peak at d =
    α/2β. Raises ValueError with fewer than three points, fewer than two different positive KLs, a negative
    KL (use the exact one: sampled estimates can fall below 0), or gold that does not vary.

    >>> fit = fit_overoptimization(torch.tensor([1.0, 4.0, 9.0]), torch.tensor([0.9, 1.6, 2.1]), form="bon")
    >>> round(fit.alpha, 6), round(fit.beta, 6), round(fit.peak_kl, 4)
    (1.0, 0.1, 25.0)
    """
    check_floats(1, kl=kl, gold=gold)
    check_choice("form", form, ("rl", "bon"))
    gold = gold.detach().to("cpu", torch.float64)
    _check_points(kl, gold)
    design = _design(kl, form)
    alpha, beta = torch.linalg.lstsq(design, gold.unsqueeze(1)).solution.squeeze(1).tolist()
    residual = (gold - design @ torch.tensor([alpha, beta], dtype=torch.float64)).square().sum()
    total = (gold - gold.mean()).square().sum()
    peak = _peak(alpha, beta, form)
    return OveroptimizationFit(form, alpha, beta, float(1 - residual / total), *peak)


def _design(kl: Tensor, form: Form) -> Tensor:
    """Columns of α and β: d, and -d·log d or -d²."""
    d = kl.detach().to("cpu", torch.float64).sqrt()
    return torch.stack([d, -torch.xlogy(d, d) if form == "rl" else -d.square()], dim=1)


def _peak(alpha: float, beta: float, form: Form) -> tuple[float | None, float | None]:
    if beta <= 0 or (form == "bon" and alpha <= 0):
        return None, None
    if form == "bon":
        return (alpha / (2 * beta)) ** 2, alpha**2 / (4 * beta)
    exponent = alpha / beta - 1
    if exponent > 300:  # e^600 nats: a straight line with noise in it, not a peak
        return None, None
    return math.exp(2 * exponent), beta * math.exp(exponent)


def _check_points(kl: Tensor, gold: Tensor) -> None:
    if not (kl.isfinite().all() and gold.isfinite().all()):
        raise ValueError("kl and gold must be finite: leave missing points out")
    if (kl < 0).any():
        raise ValueError(
            f"kl must not be negative, got {kl.min().item():g}: use exact KL, not a sampled estimate"
        )
    if len(kl) < 3 or kl[kl > 0].unique().numel() < 2:
        raise ValueError(
            f"a fit of two numbers needs three points and two different positive KLs, got {kl.tolist()}"
        )
    if gold.unique().numel() < 2:
        raise ValueError(f"gold does not vary (every value is {gold[0].item():g}): there is no curve to fit")
