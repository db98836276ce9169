"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_detached, check_floats, check_mask, wide
from .reduce import Reduction, reduce


def value_loss(
    values: Tensor,
    values_old: Tensor | None,
    returns: Tensor,
    clip: float | None = 0.2,
    mask: Tensor | None = None,
    reduction: Reduction = "token-mean",
    length: int | None = None,
) -> Tensor:
    """½·max((V - R)², (clip(V, V_old - c, V_old + c) - R)²): PPO's clipped value loss (c is `clip`).

    values, values_old, returns, mask (N, L), `returns` the targets of `gae`. clip=None is ½·(V - R)², and
    values_old may then be None. The maximum is pessimistic: the gradient is V - R, except 0 where V has left
    the interval towards R and beyond it. `reduction` and `length` as in `reduce`. Returns a scalar ("none":
    (N, L)). Raises ValueError if values_old or returns require grad: neither is moved.

    >>> value_loss(torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    tensor(0.3200)
    """
    check_floats(2, values=values, returns=returns)
    check_detached(returns=returns)
    # Masked before any arithmetic: whatever becomes of these slots, no gradient gets past this line.
    values, returns = wide(values).masked_fill(~check_mask(mask, values), 0.0), wide(returns)
    squares = (values - returns).square()
    if clip is not None:
        if not clip > 0:
            raise ValueError(f"clip must be above 0, or None for no clip, got {clip}")
        if values_old is None:
            raise ValueError("values_old is needed to clip around; clip=None does without")
        check_floats(values=values, values_old=values_old)
        check_detached(values_old=values_old)
        near = wide(values_old) + (values - wide(values_old)).clamp(-clip, clip)
        squares = torch.maximum(squares, (near - returns).square())
    return reduce(squares / 2, mask, reduction, length)
