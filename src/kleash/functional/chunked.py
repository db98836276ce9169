"""Log-probabilities, entropy and exact KL straight from hidden states, one slice of the vocabulary at a time.

A batch of M positions over V tokens has M·V logits, which is the largest tensor of a training step by far.
These kernels never hold it: they walk over the vocabulary in slices of about `chunk` logits and keep a
running softmax per position (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867). Backward computes
each slice again.

Precision. The matrix product runs in the dtype of autocast where it is on, otherwise in the dtype of
`hidden`; everything after it is float32 (float64 for float64 input). A bfloat16 product on the CPU also
rounds its result to bfloat16, about 0.03 on a logit of 16. The logit of the target is therefore taken apart
in float32 and put back into the slice: the rounding of the other logits then averages out in the log-sum-exp,
and a confident prediction (target far above the rest) comes out exact. `linear_kl` weighs every token and has
no such remedy for the others: measure outside autocast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_CPU = 1 << 19  # 2 MB of float32: the slice stays in the processor's cache
CHUNK_DEVICE = 1 << 26  # 256 MB: few enough launches to keep a GPU busy


@dataclass(frozen=True)
class _Head:
    """From products to logits: z = cap(scale·(h·Wᵀ + bias)) / temperature, then `forbidden` removed."""

    scale: float
    softcap: float | None
    temperature: float
    forbidden: Tensor | None
    dtype: torch.dtype  # of the matrix products
    chunk: int

    @property
    def wide(self) -> torch.dtype:
        """Dtype of everything that is not a matrix product."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def slices(self, rows: int, vocabulary: int) -> Iterator[tuple[int, int]]:
        width = max(1, self.chunk // max(rows, 1))
        for start in range(0, vocabulary, width):
            yield start, min(start + width, vocabulary)

    def transform(self, raw: Tensor, bias: Tensor | None) -> Tensor:
        """Raw products to logits, in place: `raw` is this module's own buffer."""
        if bias is not None:
            raw += bias.to(raw.dtype)
        if self.scale != 1.0:
            raw *= self.scale
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1.0:
            raw /= self.temperature
        return raw

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
        """(M, stop - start) logits in the wide dtype; forbidden tokens get its lowest finite number."""
        raw = torch.mm(hidden, weight[start:stop].to(self.dtype).t()).to(self.wide)
        z = self.transform(raw, None if bias is None else bias[start:stop])
        return self.fill_forbidden(z, start, stop, torch.finfo(self.wide).min)

    def fill_forbidden(self, z: Tensor, start: int, stop: int, value: float) -> Tensor:
        if self.forbidden is not None:
            inside = self.forbidden[(self.forbidden >= start) & (self.forbidden < stop)]
            z.index_fill_(1, inside - start, value)
        return z

    def target_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """(M,) logits of the targets alone, products included in the wide dtype."""
        rows = weight[targets].to(self.dtype).to(self.wide)
        raw = torch.linalg.vecdot(hidden.to(self.wide), rows)
        return self.transform(raw, None if bias is None else bias[targets])

    def slope(self, z: Tensor) -> Tensor | float:
        """d logit / d raw product, from the logits themselves."""
        if self.softcap is None:
            return self.scale / self.temperature
        return (1 - (z * (self.temperature / self.softcap)) ** 2) * (self.scale / self.temperature)


class _RunningSoftmax:
    """Softmax statistics of a row of logits that arrives in slices.

    Keeps the maximum m, S = Σ e^(z-m) and A = Σ e^(z-m)·(z-m). It starts at a logit that is surely finite
    (the target's), so that a slice of forbidden tokens alone cannot set the maximum.
    """

    def __init__(self, finite_logit: Tensor) -> None:
        self.maximum = finite_logit.clone()
        self.total = torch.zeros_like(finite_logit)
        self.weighted = torch.zeros_like(finite_logit)

    def add(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a slice (left as z - m); returns e^(z-m) and the factor that shrinks earlier sums."""
        maximum = torch.maximum(self.maximum, z.amax(1))
        shift = self.maximum - maximum
        shrink = shift.exp()
        z -= maximum.unsqueeze(1)
        e = z.exp()
        self.weighted = shrink * (self.weighted + shift * self.total) + _row_dot(e, z)
        self.total = shrink * self.total + e.sum(1)
        self.maximum = maximum
        return e, shrink

    @property
    def log_total(self) -> Tensor:
        return self.maximum + self.total.log()

    @property
    def entropy(self) -> Tensor:
        return self.total.log() - self.weighted / self.total


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_v a·b per row without a third (M, V) buffer."""
    return torch.einsum("mv,mv->m", a, b)


def _targets_inside(targets: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Rows whose target lies in the slice, and its column there."""
    rows = ((targets >= start) & (targets < stop)).nonzero().squeeze(1)
    return rows, targets[rows] - start


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        h = hidden.to(head.dtype)
        at_target = head.target_logits(h, weight, bias, targets)
        softmax = _RunningSoftmax(at_target)
        for start, stop in head.slices(len(h), len(weight)):
            z = head.logits(h, weight, bias, start, stop)
            rows, columns = _targets_inside(targets, start, stop)
            z[rows, columns] = at_target[rows]
            softmax.add(z)
        entropy = softmax.entropy
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, targets, at_target, softmax.log_total)
        ctx.mark_non_differentiable(entropy)
        return at_target - softmax.log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(upstream.device.type, enabled=False):
            return *_backward(ctx, upstream), None, None


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """d logp_m / d z_mv = [v = target] - p_mv, slice by slice; p comes again from the saved log-sum-exp."""
    hidden, weight, bias, targets, at_target, log_total = ctx.saved_tensors
    head: _Head = ctx.head
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    h = hidden.to(head.dtype)
    grad_hidden = torch.zeros_like(hidden, dtype=head.wide) if need_hidden else None
    grad_weight = torch.zeros_like(weight) if need_weight else None
    grad_bias = torch.zeros_like(bias) if need_bias else None
    for start, stop in head.slices(len(h), len(weight)):
        z = head.logits(h, weight, bias, start, stop)
        rows, columns = _targets_inside(targets, start, stop)
        z[rows, columns] = at_target[rows]
        slope = head.slope(z)
        grad = z.sub_(log_total.unsqueeze(1)).exp_().mul_(-upstream.unsqueeze(1))
        grad[rows, columns] += upstream[rows]
        grad = head.fill_forbidden(grad.mul_(slope), start, stop, 0.0)
        if grad_bias is not None:
            grad_bias[start:stop] = grad.sum(0)
        narrow = grad.to(head.dtype)
        if grad_hidden is not None:
            grad_hidden += torch.mm(narrow, weight[start:stop].to(head.dtype))
        if grad_weight is not None:
            grad_weight[start:stop] = torch.mm(narrow.t(), h)
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    forbidden: Tensor | Sequence[int] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, without holding the logits.

    logp_m = z_m[target_m] - log Σ_v e^(z_mv) with z = cap(scale·(hidden·weightᵀ + bias)) / temperature and
    cap(u) = softcap·tanh(u / softcap): the heads of Gemma 2 (cap), Cohere and Granite (scale) and Phi (bias).

    hidden (M, H), weight (V, H), targets (M,) of ids, bias (V,). `forbidden` ids are taken out before the
    softmax (probability 0, no gradient). `chunk`: logits held at once; the default suits the device.
    Returns logp (M,) and entropy (M,), in nats, float32 or better. Gradients reach hidden, weight and bias
    through logp, once (no second derivative); entropy carries none.
    Raises ValueError on shapes that do not fit, a target outside the vocabulary or forbidden, a temperature
    that is not positive.

    >>> hidden, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    >>> logp, entropy = linear_logprobs(hidden[:1], weight, torch.tensor([1]), temperature=0.5, forbidden=[2])
    >>> round(logp.item(), 6)
    -0.126928
    """
    _check_matrices("hidden", hidden, "weight", weight, "bias", bias)
    head = _head(hidden, scale, softcap, temperature, forbidden, chunk, len(weight))
    _check_targets(targets, len(hidden), len(weight), head.forbidden)
    with torch.autocast(hidden.device.type, enabled=False):
        result = _LinearLogprobs.apply(hidden, weight, bias, targets, head)
    return cast("tuple[Tensor, Tensor]", result)


def linear_kl(
    hidden_p: Tensor,
    weight_p: Tensor,
    hidden_q: Tensor,
    weight_q: Tensor,
    targets: Tensor,
    *,
    bias_p: Tensor | None = None,
    bias_q: Tensor | None = None,
    scale_p: float = 1.0,
    scale_q: float = 1.0,
    softcap_p: float | None = None,
    softcap_q: float | None = None,
    temperature: float = 1.0,
    forbidden: Tensor | Sequence[int] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exact KL(p‖q) over the vocabulary at each position, from two models' hidden states.

    KL_m = Σ_v p_mv·(log p_mv - log q_mv)  (seed 004, Eq. 4, one position). Gradients reach the side p through
    kl, once; q is a constant, and the other outputs carry none. Arguments ending in _p belong to
    the policy, in _q to the reference; each side is as in `linear_logprobs`, hidden widths may differ, the
    vocabulary may not. `temperature` and `forbidden` act on both sides: one support, one renormalisation.
    Returns kl, logp_p, logp_q (of the targets) and the entropy of p, each (M,), in nats. Equal inputs give
    exactly 0; otherwise rounding may leave a kl of order -1e-6 where the truth is nearer 0.
    Raises ValueError as `linear_logprobs`, and when the two sides disagree in rows or vocabulary.
    """
    _check_matrices("hidden_p", hidden_p, "weight_p", weight_p, "bias_p", bias_p)
    _check_matrices("hidden_q", hidden_q, "weight_q", weight_q, "bias_q", bias_q)
    if len(hidden_p) != len(hidden_q) or len(weight_p) != len(weight_q):
        raise ValueError(
            f"both sides need the same positions and vocabulary: p has {len(hidden_p)} rows over "
            f"{len(weight_p)} tokens, q has {len(hidden_q)} over {len(weight_q)}"
        )
    head_p = _head(hidden_p, scale_p, softcap_p, temperature, forbidden, chunk, len(weight_p))
    head_q = _head(hidden_q, scale_q, softcap_q, temperature, forbidden, chunk, len(weight_q))
    _check_targets(targets, len(hidden_p), len(weight_p), head_p.forbidden)
    with torch.autocast(hidden_p.device.type, enabled=False):
        result = _LinearKL.apply(
            hidden_p, weight_p, bias_p, hidden_q.detach(), weight_q.detach(), bias_q, targets, head_p, head_q
        )
    return cast("tuple[Tensor, Tensor, Tensor, Tensor]", result)


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_p: Tensor,
        weight_p: Tensor,
        bias_p: Tensor | None,
        hidden_q: Tensor,
        weight_q: Tensor,
        bias_q: Tensor | None,
        targets: Tensor,
        head_p: _Head,
        head_q: _Head,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        p = (hidden_p.to(head_p.dtype), weight_p, bias_p)
        q = (hidden_q.to(head_q.dtype), weight_q, bias_q)
        at_p, at_q = head_p.target_logits(*p, targets), head_q.target_logits(*q, targets)
        softmax_p, softmax_q = _RunningSoftmax(at_p), _RunningSoftmax(at_q)
        gap = torch.zeros_like(at_p)  # Σ e^(z_p - m)·(z_p - z_q): differences first, or nearby models cancel
        for start, stop in head_p.slices(len(targets), len(weight_p)):
            z_p, z_q = head_p.logits(*p, start, stop), head_q.logits(*q, start, stop)
            _put(z_p, at_p, z_q, at_q, targets, start, stop)
            difference = z_p - z_q
            softmax_q.add(z_q)
            e, shrink = softmax_p.add(z_p)
            gap = shrink * gap + _row_dot(e, difference)
        log_p, log_q = softmax_p.log_total, softmax_q.log_total
        kl = gap / softmax_p.total - (log_p - log_q)
        others = at_p - log_p, at_q - log_q, softmax_p.entropy
        ctx.heads = head_p, head_q
        ctx.save_for_backward(
            hidden_p, weight_p, bias_p, hidden_q, weight_q, bias_q, targets, at_p, at_q, log_p, log_q, kl
        )
        ctx.mark_non_differentiable(*others)
        return kl, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(upstream.device.type, enabled=False):
            return *_kl_backward(ctx, upstream), None, None, None, None, None, None


def _kl_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """d KL_m / d z_mv = p_mv·(log p_mv - log q_mv - KL_m), slice by slice."""
    hidden, weight, bias, hidden_q, weight_q, bias_q, targets, at_p, at_q, log_p, log_q, kl = (
        ctx.saved_tensors
    )
    head, head_q = ctx.heads
    h, h_q = hidden.to(head.dtype), hidden_q.to(head_q.dtype)
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_hidden = torch.zeros_like(hidden, dtype=head.wide) if need_hidden else None
    grad_weight = torch.zeros_like(weight) if need_weight else None
    grad_bias = torch.zeros_like(bias) if need_bias else None
    shift = (log_p - log_q + kl).unsqueeze(1)
    for start, stop in head.slices(len(h), len(weight)):
        z_p = head.logits(h, weight, bias, start, stop)
        z_q = head_q.logits(h_q, weight_q, bias_q, start, stop)
        _put(z_p, at_p, z_q, at_q, targets, start, stop)
        slope = head.slope(z_p)
        grad = z_q.neg_().add_(z_p).sub_(shift).mul_(upstream.unsqueeze(1))
        grad = grad.mul_(z_p.sub_(log_p.unsqueeze(1)).exp_()).mul_(slope)
        narrow = head.fill_forbidden(grad, start, stop, 0.0).to(head.dtype)
        if grad_bias is not None:
            grad_bias[start:stop] = grad.sum(0)
        if grad_hidden is not None:
            grad_hidden += torch.mm(narrow, weight[start:stop].to(head.dtype))
        if grad_weight is not None:
            grad_weight[start:stop] = torch.mm(narrow.t(), h)
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def _put(
    z_p: Tensor, at_p: Tensor, z_q: Tensor, at_q: Tensor, targets: Tensor, start: int, stop: int
) -> None:
    """Targets' logits, computed apart in the wide dtype, into their places in a slice of both sides."""
    rows, columns = _targets_inside(targets, start, stop)
    z_p[rows, columns], z_q[rows, columns] = at_p[rows], at_q[rows]


def _head(
    hidden: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
    forbidden: Tensor | Sequence[int] | None,
    chunk: int | None,
    vocabulary: int,
) -> _Head:
    device = hidden.device
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0 (None for no cap), got {softcap}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is the number of logits held at once and must be at least 1, got {chunk}")
    ids = None
    if forbidden is not None and len(forbidden):
        ids = torch.as_tensor(forbidden, dtype=torch.long, device=device)
        if ids.ndim != 1 or ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"forbidden must be a 1-D list of ids in [0, {vocabulary}), got {ids.tolist()}")
    autocast = torch.is_autocast_enabled(device.type) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
    default = CHUNK_CPU if device.type == "cpu" else CHUNK_DEVICE
    return _Head(scale, softcap, temperature, ids, dtype, chunk or default)


def _check_matrices(h: str, hidden: Tensor, w: str, weight: Tensor, b: str, bias: Tensor | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        shapes = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"{h} must be (M, H) and {w} (V, H), got {shapes}")
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"{h} and {w} must be floating point, got {hidden.dtype} and {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{b} must be (V,) = ({len(weight)},), got {tuple(bias.shape)}")


def _check_targets(targets: Tensor, rows: int, vocabulary: int, forbidden: Tensor | None) -> None:
    if targets.dtype != torch.long or targets.shape != (rows,):
        got = f"{tuple(targets.shape)} of {targets.dtype}"
        raise ValueError(f"targets must be ({rows},) of int64 ids, got {got}")
    if rows == 0:
        return
    if targets.min() < 0 or targets.max() >= vocabulary:
        worst = int(targets.min()) if targets.min() < 0 else int(targets.max())
        raise ValueError(f"targets must be ids in [0, {vocabulary}), found {worst}")
    if forbidden is not None and torch.isin(targets, forbidden).any():
        row = int(torch.isin(targets, forbidden).nonzero()[0])
        raise ValueError(f"target {int(targets[row])} at row {row} is forbidden: its log-probability is -inf")
