"""Every fast path of the forward pass against the model's own plain forward, for many families."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny
from torch import Tensor
from transformers import PreTrainedModel

from kleash.data.batches import Batch
from kleash.models import batch_kl, batch_logprobs, frozen_copy, load_model, response_logprobs, verify_forward
from kleash.models.attention import NAME

LENGTHS = [(3, 4), (6, 2), (1, 7), (5, 5)]  # (prompt, response) of each row


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def rows(seed: int = 0) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(3, VOCABULARY, (p + r,), generator=generator), p) for p, r in LENGTHS]


def plain_logprobs(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:
    """One row alone, through the model's own head: log-probs of its response."""
    logits = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return logits[prompt - 1 : -1].gather(-1, ids[prompt:, None])[:, 0]


def padded(items: list[tuple[Tensor, int]], extra: int = 0) -> Batch:
    width = max(len(ids) for ids, _ in items) + extra
    tokens = torch.full((len(items), width), 7)
    mask, trained = (
        torch.zeros(len(items), width, dtype=torch.bool),
        torch.zeros(len(items), width, dtype=torch.bool),
    )
    for row, (ids, prompt) in enumerate(items):
        tokens[row, : len(ids)], mask[row, : len(ids)], trained[row, prompt : len(ids)] = ids, True, True
    return Batch(tokens, mask, trained)


def pairs() -> Batch:
    """Two groups of two rows that share prompts of 5 and 2 tokens."""
    generator = torch.Generator().manual_seed(3)
    items = []
    for prompt, responses in ((5, (3, 6)), (2, (4, 1))):
        head = torch.randint(3, VOCABULARY, (prompt,), generator=generator)
        for length in responses:
            items.append(
                (torch.cat([head, torch.randint(3, VOCABULARY, (length,), generator=generator)]), prompt)
            )
    batch = padded(items, extra=2)
    return Batch(batch.tokens, batch.attention_mask, batch.response_mask, 2, torch.tensor([5, 2]))


def test_logprobs_equal_the_plain_forward_row_by_row(family: str) -> None:
    """Reports 2 and 27: alone or in a padded batch, with or without our attention, one value."""
    model, items = tiny(family), rows()
    expected = [plain_logprobs(model, ids, prompt) for ids, prompt in items]
    fast, _ = load_model((model, None))  # switches the attention where the family allows it
    for extra in (0, 3):
        logp, mask = batch_logprobs(fast, padded(items, extra))
        for row, value in enumerate(expected):
            torch.testing.assert_close(logp[row, : len(value)], value, atol=1e-5, rtol=1e-5)
            assert mask[row].sum() == len(value)
            assert not logp[row, len(value) :].any()


def test_shared_prefix_equals_whole_rows_in_values_and_gradients(family: str) -> None:
    model, batch = tiny(family), pairs()
    load_model((model, None))
    whole = Batch(batch.tokens, batch.attention_mask, batch.response_mask)
    results = []
    for each in (whole, batch):
        model.zero_grad()
        logp, mask = batch_logprobs(model, each)
        (logp * mask).sum().backward()
        results.append((logp.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    for left, right in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-4)


def test_left_and_right_padded_prompts_agree(family: str) -> None:
    model = tiny(family)
    load_model((model, None))
    ids, prompt = rows()[0]
    response = ids[None, prompt:]
    expected = plain_logprobs(model, ids, prompt)
    for pad in ((2, 0), (0, 2)):
        prompts = torch.nn.functional.pad(ids[None, :prompt], pad, value=9)
        mask = torch.nn.functional.pad(torch.ones(1, prompt, dtype=torch.bool), pad)
        got = response_logprobs(model, prompts, response, prompt_mask=mask)
        torch.testing.assert_close(got[0], expected, atol=1e-5, rtol=1e-5)


def test_exact_kl_and_entropy_equal_the_full_logits(family: str) -> None:
    policy, reference, items = tiny(family, 0), tiny(family, 1), rows()
    for model in (policy, reference):
        load_model((model, None))
    for forbidden, temperature in (((), 1.0), ((2, 5), 0.7)):
        stats = batch_kl(policy, reference, padded(items, 2), temperature=temperature, forbidden=forbidden)
        for row, (ids, prompt) in enumerate(items):
            both = []
            for model in (policy, reference):
                logits = model(input_ids=ids[None]).logits[0, prompt - 1 : -1].float() / temperature
                logits[:, list(forbidden)] = -torch.inf
                both.append(logits.log_softmax(-1))
            p, q = both
            keep = torch.isfinite(p)
            gap = torch.where(keep, p - q, 0.0)
            length = len(ids) - prompt
            torch.testing.assert_close(stats.kl[row, :length], (p.exp() * gap).sum(-1), atol=1e-5, rtol=1e-4)
            entropy = -(p.exp() * torch.where(keep, p, 0.0)).sum(-1)
            torch.testing.assert_close(stats.entropy[row, :length], entropy, atol=1e-5, rtol=1e-4)


def test_a_model_is_at_zero_kl_from_its_frozen_copy(family: str) -> None:
    model = tiny(family)
    stats = batch_kl(model, frozen_copy(model), padded(rows()))
    assert stats.kl.abs().max() == 0.0
    assert torch.equal(stats.logp, stats.logp_ref)


def test_verify_forward_passes_and_catches_an_unknown_head(family: str) -> None:
    model = tiny(family)
    assert verify_forward(model) < 1e-4
    plain = model.forward

    def scaled(*args: object, **options: object) -> object:
        out = plain(*args, **options)
        out.logits = out.logits * 1.5
        return out

    model.forward = scaled
    with pytest.raises(Exception, match="head or its attention does something this library does not know"):
        verify_forward(model)


def test_grouped_attention_is_used_where_it_can_be() -> None:
    used = {
        name for name in FAMILIES if load_model((tiny(name), None))[0].config._attn_implementation == NAME
    }
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "mixtral"} <= used
