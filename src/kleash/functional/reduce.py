"""From many values to one number. The same names mean other things elsewhere, so each is spelt out."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ._checks import check_choice, check_floats, check_mask, wide

Reduction = Literal["token-mean", "sequence-mean", "sequence-token-mean", "constant", "none"]
REDUCTIONS = ("token-mean", "sequence-mean", "sequence-token-mean", "constant")

PairReduction = Literal["mean", "sum", "none"]


def aggregate(
    values: Tensor, mask: Tensor | None = None, reduction: Reduction = "token-mean", length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Per-sequence numerators (N,) and the count (scalar) whose quotient `items.sum() / count` is the loss.

    A step that accumulates micro-batches or runs on several processes adds up both and divides once;
    dividing each micro-batch by its own count is a mean of means. values, mask (N, L); with m = Σ_t mask_t
    tokens in a row,

      token-mean           Σ_t v_t            count = all tokens       every token weighs the same
      sequence-mean        Σ_t v_t            count = sequences        seed 004, Eq. 6
      sequence-token-mean  Σ_t v_t / m        count = sequences        GRPO as published
      constant             Σ_t v_t / length   count = sequences        Dr. GRPO, https://arxiv.org/abs/2503.20783

    A row without tokens adds 0 to both. Masked values never matter, whatever they hold (inf and nan
    included).
    """
    check_floats(2, values=values)
    check_choice("reduction", reduction, REDUCTIONS)
    if (length is None) == (reduction == "constant") or (length is not None and length < 1):
        raise ValueError(
            f"length (at least 1) belongs to reduction='constant' alone, got {length} with {reduction!r}"
        )
    mask = check_mask(mask, values)
    sums = wide(values).masked_fill(~mask, 0.0).sum(1)
    tokens = mask.sum(1)
    if reduction == "token-mean":
        return sums, tokens.sum()
    if reduction == "sequence-token-mean":
        sums = sums / tokens.clamp(min=1)
    elif length is not None:
        sums = sums / length
    return sums, (tokens > 0).sum()


def reduce(
    values: Tensor, mask: Tensor | None = None, reduction: Reduction = "token-mean", length: int | None = None
) -> Tensor:
    """The scalar of `aggregate`, or with reduction="none" the values (N, L) with masked slots 0.

    A batch without any token gives 0, with zero gradient.

    >>> import torch
    >>> values = torch.tensor([[1.0, 1.0, 9.0], [0.0, 0.0, 0.0]])
    >>> mask = torch.tensor([[True, True, False], [True, True, True]])
    >>> [reduce(values, mask, r).item() for r in ("token-mean", "sequence-token-mean", "sequence-mean")]
    [0.4000000059604645, 0.5, 1.0]
    """
    if reduction == "none":
        check_floats(2, values=values)
        return wide(values).masked_fill(~check_mask(mask, values), 0.0)
    items, count = aggregate(values, mask, reduction, length)
    return items.sum() / count.clamp(min=1)


def reduce_pairs(values: Tensor, reduction: PairReduction = "mean") -> Tensor:
    """Mean or sum over pairs, or the values themselves. The mean of no pairs is 0, with zero gradient."""
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.sum() / max(values.numel(), 1)
