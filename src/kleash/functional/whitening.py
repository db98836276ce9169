"""Whitening: zero mean and unit deviation over all real slots, of one process or of many."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_floats, check_mask, wide

NO_SPREAD = 1e-14
"""Squared deviations that add up to less than this share of the squares are float64's rounding."""


@torch.no_grad()
def masked_moments(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """(count, Σ v, Σ v²) of the real slots, float64: add them up over batches or processes, then `whiten`.

    values, mask any shape -> (3,). Masked slots never matter, whatever they hold.

    >>> masked_moments(torch.tensor([1.0, 2.0, 3.0, 7.0]), torch.tensor([True, True, True, False]))
    tensor([ 3.,  6., 14.], dtype=torch.float64)
    """
    check_floats(values=values)
    real = values[check_mask(mask, values)].double()
    return torch.stack([real.new_tensor(float(real.numel())), real.sum(), real.square().sum()])


@torch.no_grad()
def whiten(
    values: Tensor, mask: Tensor | None = None, shift: bool = True, moments: Tensor | None = None
) -> Tensor:
    """(v - mean)/std over all real slots, with the sample deviation (n - 1) and no epsilon.

    shift=False adds the mean back: unit deviation around the mean that was there (for rewards, whose mean
    should stay). `moments` (3,), the sum of several `masked_moments`, whitens by the mean and deviation of
    all of them; without it, by those of `values`. Any shape; masked slots are 0. Without spread (a deviation
    below 1e-7 of the root mean square is rounding), or with fewer than two values, v - mean is exactly 0.
    Carries no gradient. Raises ValueError on real values that are not finite.

    >>> whiten(torch.tensor([[1.0, 2.0, 3.0, 7.0]]), torch.tensor([[True, True, True, False]]))
    tensor([[-1.,  0.,  1.,  0.]])
    """
    check_floats(values=values)
    mask = check_mask(mask, values)
    moments = masked_moments(values, mask) if moments is None else moments
    if moments.shape != (3,):
        raise ValueError(
            f"moments must be (3,), summed from masked_moments, got shape {tuple(moments.shape)}"
        )
    count, total, squares = moments.double().tolist()
    if not torch.isfinite(moments).all():
        raise ValueError(
            f"values must be finite where the mask is True, got a sum of {total} over {count:.0f} values"
        )
    mean = total / max(count, 1)
    spread = squares - total * mean
    deviation = (spread / (count - 1)) ** 0.5 if spread > NO_SPREAD * squares else torch.inf
    out = (values.double() - mean) / deviation + (0.0 if shift else mean)
    return out.masked_fill(~mask, 0.0).to(wide(values).dtype)
