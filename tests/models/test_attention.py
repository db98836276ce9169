"""Grouped attention against the textbook formula, in float32 and under bfloat16 autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kleash.models.attention import additive_mask, grouped_attention

ROWS, HEADS, KEY_HEADS, TOKENS, SIZE = 2, 6, 2, 40, 16


def inputs(queries: int = TOKENS, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values whose scores reach some tens, and a causal mask."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS, HEADS, queries, SIZE, generator=generator) * spread
    key = torch.randn(ROWS, KEY_HEADS, TOKENS, SIZE, generator=generator) * spread
    value = torch.randn(ROWS, KEY_HEADS, TOKENS, SIZE, generator=generator)
    return query, key, value, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None, -queries:]


def textbook(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, softcap: float | None) -> Tensor:
    """softmax(QKᵀ/√D)V in float64, keys and values repeated for their query heads."""
    key, value = (x.double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    scores = query.double() @ key.transpose(2, 3) * SIZE**-0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def grouped(*parts: Tensor, softcap: float | None = None, bfloat16: bool = False) -> Tensor:
    query, key, value, allowed = parts
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        mask = additive_mask(allowed, torch.float32)
        return grouped_attention(nn.Module(), query, key, value, mask, softcap=softcap)[0]


def with_gradients(run: object, parts: tuple[Tensor, ...], **options: object) -> list[Tensor]:
    leaves = [part.clone().requires_grad_() for part in parts[:3]]
    out = run(*leaves, parts[3], **options)  # type: ignore[operator]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [
        out.detach().double(),
        *(g.double() for g in torch.autograd.grad((out.float() * weight).sum(), leaves)),
    ]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_values_and_gradients_are_the_textbooks(softcap: float | None) -> None:
    parts = inputs()
    expected = with_gradients(textbook, parts, softcap=softcap)
    for got, exact in zip(with_gradients(grouped, parts, softcap=softcap), expected, strict=True):
        torch.testing.assert_close(got, exact, atol=1e-4, rtol=1e-4)
    for got, exact in zip(
        with_gradients(grouped, parts, softcap=softcap, bfloat16=True), expected, strict=True
    ):
        assert float((got - exact).norm() / exact.norm()) < 0.01


def test_under_autocast_only_weights_and_values_are_rounded() -> None:
    """Rounded scores, here up to some tens, would be off by 1/16 and the result by percents."""
    query, key, value, allowed = inputs(spread=6.0)
    value = torch.ones_like(value).cumsum(2) % 2  # exact in bfloat16
    got, exact = (
        grouped(query, key, value, allowed, bfloat16=True),
        textbook(query, key, value, allowed, None),
    )
    assert got.dtype == torch.bfloat16
    assert float((got.double() - exact).abs().max()) < 3 * 2**-9


def test_one_query_is_rounded_as_every_other_product() -> None:
    query, key, value, allowed = inputs(queries=1)
    low = [x.bfloat16() for x in (query * 1.0, key, value)]
    stacked = low[0].view(ROWS, KEY_HEADS, -1, SIZE) * SIZE**-0.5
    expected = (stacked @ low[1].transpose(2, 3)).softmax(-1) @ low[2]
    assert torch.equal(grouped(query, key, value, allowed, bfloat16=True).flatten(), expected.flatten())


def test_a_query_that_may_look_nowhere_stays_finite() -> None:
    query, key, value, allowed = inputs()
    for bfloat16 in (False, True):
        out = grouped(query, key, value, torch.zeros_like(allowed), bfloat16=bfloat16)
        torch.testing.assert_close(
            out.float(), value.mean(2).repeat_interleave(3, 1)[:, None].expand_as(out), atol=0.02, rtol=0.02
        )
