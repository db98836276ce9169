"""Attention as grouped matrix products: fast on CPU, for any architecture with a pluggable attention.

Queries that share a key head are stacked into one matrix, so keys and values are never repeated and each
layer is two batched matrix products. On CPUs with fast bfloat16 this beats scaled-dot-product attention by
a wide margin, in decoding (one query a row) as well as in training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

NAME = "kleash_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """softmax(QKᵀ·scaling + mask)V with query heads grouped by the key head they share.

    query (N, Hq, Tq, D); key, value (N, Hkv, Tk, D) with Hq a multiple of Hkv; attention_mask (N or 1, 1,
    Tq, Tk), additive. Returns (N, Tq, Hq, D). `softcap` c bounds the scores by c·tanh(score/c) before the
    mask (Gemma 2). Under autocast the scores of several queries are exact, see `_ExactWeights`; those of one
    query, in decoding, are rounded like every other product. Attention sinks and position biases are not
    supported and raise ValueError.
    """
    for name in ("s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(
                f"grouped attention does not support {name!r}; load the model with its own attention"
            )
    rows, heads, queries, size = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    shape = (rows, key_heads, heads // key_heads, queries, keys)
    scaling = size**-0.5 if scaling is None else scaling
    stacked = query.reshape(rows, key_heads, -1, size)
    mask = None if attention_mask is None else attention_mask[:, :, None, :, :keys]
    rounded = torch.is_autocast_enabled(query.device.type)
    compute = torch.get_autocast_dtype(query.device.type) if rounded else value.dtype
    if rounded and queries > 1:
        weights = _ExactWeights.apply(stacked.float() * scaling, key, shape, mask, softcap, compute)
    else:
        scores = torch.matmul(stacked.to(compute) * scaling, key.to(compute).transpose(2, 3)).view(shape)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    if dropout > 0.0 and module.training:
        weights = F.dropout(weights, p=dropout)
    out = torch.matmul(weights.view(rows, key_heads, -1, keys), value.to(compute))
    return out.view(rows, heads, queries, value.shape[-1]).transpose(1, 2), None


class _ExactWeights(torch.autograd.Function):
    """softmax(scores + mask) of float32 scores, rounded to the dtype of the other products.

    Rounding the scores themselves would bias every log-prob: one beyond 16 moves by up to 1/16 in bfloat16,
    and the softmax is not linear. (A float32 softmax of rounded scores changes no bit.) The backward pass
    keeps rounded values alone: in memory and time it is that of rounded scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        shape: tuple[int, ...],
        mask: Tensor | None,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            scores = torch.matmul(query, key.float().transpose(2, 3)).view(shape)
            slope = None
            if softcap is not None:
                scores = torch.tanh(scores / softcap)
                slope = (1 - scores.square()).to(dtype)
                scores *= softcap
            if mask is not None:
                scores += mask
            weights = torch.softmax(scores, dim=-1).to(dtype)
        ctx.save_for_backward(query.to(dtype), key.to(dtype), weights, slope)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, weights, slope = ctx.saved_tensors
        inner = torch.ops.aten._softmax_backward_data(gradient, weights, -1, weights.dtype)
        if slope is not None:
            inner = inner * slope
        inner = inner.view(*query.shape[:3], -1)
        return torch.matmul(inner, key), torch.matmul(inner.transpose(2, 3), query), None, None, None, None


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may look and hugely negative elsewhere, in the dtype attention computes in.

    Half of the dtype's lowest number, so that adding a score to it stays finite: a query that may look
    nowhere (padding) then averages what it sees instead of becoming NaN.
    """
    kind = allowed.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min / 2)


def grouped_mask(*, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    """The additive mask (N, 1, Tq, Tk) of grouped attention."""
    return additive_mask(sdpa_mask(**options | {"allow_is_causal_skip": False}), dtype)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, grouped_mask)


def use_grouped_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a model on CPU to grouped attention where its architecture lets attention be replaced."""
    if model.device.type == "cpu" and getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(NAME)
    return model
