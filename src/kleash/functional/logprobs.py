"""Log-probabilities of given tokens and of whole responses. Logits come aligned with the tokens."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._checks import check_choice, check_floats, check_mask, wide

_CHUNK = 1 << 20  # logits turned to float32 at once


class _TokenLogprobs(torch.autograd.Function):
    """z[token] - logsumexp(z), rows in chunks: forward makes no (M, V) tensor, backward only the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        parts = [wide(part).logsumexp(1) for part in logits.split(_rows_at_once(logits))]
        log_total = torch.cat(parts) if parts else wide(logits.new_empty(0))
        ctx.save_for_backward(logits, tokens, log_total)
        return wide(logits.gather(1, tokens.unsqueeze(1)).squeeze(1)) - log_total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        logits, tokens, log_total = ctx.saved_tensors
        grad = torch.empty_like(logits)
        size = _rows_at_once(logits)
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            p = (wide(logits[rows]) - log_total[rows].unsqueeze(1)).exp_()
            g = upstream[rows].unsqueeze(1)
            grad[rows] = p.mul_(-g).scatter_add_(1, tokens[rows].unsqueeze(1), g)
        return grad, None


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _CHUNK // max(logits.shape[1], 1))


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log π(token) at each position: z[token] - log Σ_v e^(z_v), never by way of a full log-softmax.

    logits (N, L, V), tokens (N, L) of ids; position t's logits are those that predict token t (no shift
    here). Returns (N, L) in nats, float32 or better, whatever the dtype of the logits. Divide the logits by
    the sampling temperature first; logits of -inf are tokens outside the support. A token with logit -inf
    gets -inf. Raises ValueError on other shapes and on ids outside the vocabulary.

    >>> token_logprobs(torch.tensor([[[0.0, 1.0]]]) / 0.5, torch.tensor([[1]]))
    tensor([[-0.1269]])
    """
    check_floats(3, logits=logits)
    if tokens.dtype != torch.long or tokens.shape != logits.shape[:2]:
        got = f"{tuple(tokens.shape)} of {tokens.dtype}"
        raise ValueError(f"tokens must be {tuple(logits.shape[:2])} of int64 ids, got {got}")
    vocabulary = logits.shape[2]
    if tokens.numel() and (tokens.min() < 0 or tokens.max() >= vocabulary):
        found = f"{int(tokens.min())} to {int(tokens.max())}"
        raise ValueError(f"tokens must be ids in [0, {vocabulary}), found {found}")
    flat = _TokenLogprobs.apply(logits.reshape(-1, vocabulary), tokens.reshape(-1))
    return cast(Tensor, flat).view(tokens.shape)


def sequence_logprob(
    logp: Tensor, mask: Tensor | None = None, reduction: Literal["sum", "mean"] = "sum"
) -> Tensor:
    """log π(y|x) = Σ_t log π(y_t | x, y_<t) over the response; "mean" divides by its number of tokens.

    logp, mask (N, L) -> (N,) in nats. DPO wants the sum; SimPO, ORPO and averaged IPO the mean, by name.
    A row without tokens gives 0.

    >>> sequence_logprob(torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[True, True, False]]))
    tensor([-3.])
    """
    check_floats(2, logp=logp)
    check_choice("reduction", reduction, ("sum", "mean"))
    mask = check_mask(mask, logp)
    total = wide(logp).masked_fill(~mask, 0.0).sum(1)
    return total if reduction == "sum" else total / mask.sum(1).clamp(min=1)
