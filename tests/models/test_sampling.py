"""Sampling: what is recorded is what was drawn, and what training will compute again."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny

from kleash.errors import UsageError
from kleash.models import batch_logprobs, load_model
from kleash.sampling import BLOCK, KeyValueCache, Sampler, _inverse_cdf, sample


class Tokens:
    """A tokenizer of numbers, enough for sampling."""

    eos_token_id = 2

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i == 2))


PROMPTS = ["5 6 7", "8", "9 10 11 12 13"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fixed_length", [True, False])
def test_sampler_and_trainer_agree_on_log_probs(
    family: str, fixed_length: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports 31 and 33: the ratio is 1 before any update, at any temperature, prompts of unequal length."""
    monkeypatch.setattr("kleash.sampling.BLOCK", 3)  # the cache grows on the way
    monkeypatch.setattr("kleash.sampling.PREFILL", 2)  # and is put together from two readings
    model, _ = load_model((tiny(family), None))
    for temperature in (0.6, 1.0, 1.5):
        rollouts = sample(
            model,
            Tokens(),
            PROMPTS,
            n=3,
            max_new_tokens=8,
            temperature=temperature,
            fixed_length=fixed_length,
        )
        logp, mask = batch_logprobs(
            model, rollouts.to_batch(), temperature=temperature, forbidden=rollouts.forbidden
        )
        assert torch.equal(mask, rollouts.response_mask)
        torch.testing.assert_close(logp, rollouts.logp, atol=2e-5, rtol=1e-4)


def test_fixed_length_never_samples_the_end_token() -> None:
    rollouts = sample(tiny("llama"), Tokens(), PROMPTS, n=20, max_new_tokens=9, fixed_length=True)
    assert rollouts.response_mask.all()
    assert not (rollouts.response_ids == 2).any()
    assert rollouts.forbidden == (2,)
    assert not rollouts.ended.any()


def test_report_46_nothing_follows_the_end_token() -> None:
    model = tiny("llama")
    rollouts = sample(model, Tokens(), PROMPTS, n=30, max_new_tokens=40, seed=1)
    ends = (rollouts.response_ids == 2) & rollouts.response_mask
    assert ends.any(), "the test needs rows that end"
    assert torch.equal(ends.any(1), rollouts.ended)
    last = rollouts.response_mask.sum(1) - 1
    for row in rollouts.ended.nonzero()[:, 0].tolist():
        assert rollouts.response_ids[row, last[row]] == 2
        assert ends[row].sum() == 1
    changed = rollouts.take(range(len(rollouts)))
    changed.response_ids = torch.where(changed.response_mask, changed.response_ids, 33)
    for a, b in zip(
        batch_logprobs(model, rollouts.to_batch()), batch_logprobs(model, changed.to_batch()), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_rows_do_not_depend_on_who_else_has_ended() -> None:
    """Dropping ended rows from the batch leaves the others' log-probs alone: checked against a full
    recomputation.
    """
    model = tiny("gemma2")
    rollouts = sample(model, Tokens(), PROMPTS, n=30, max_new_tokens=40, seed=1)
    assert rollouts.ended.any() and not rollouts.ended.all()
    logp, _ = batch_logprobs(model, rollouts.to_batch())
    torch.testing.assert_close(logp, rollouts.logp, atol=2e-5, rtol=1e-4)


def test_same_seed_same_ids_and_another_seed_others() -> None:
    model = tiny("llama")
    first, again, other = (sample(model, Tokens(), PROMPTS, n=2, max_new_tokens=8, seed=s) for s in (0, 0, 1))
    assert torch.equal(first.response_ids, again.response_ids)
    assert not torch.equal(first.response_ids, other.response_ids)


def test_sampled_frequencies_are_the_model_s_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    states = logits.expand(40_000, 4)
    sampler = Sampler(1.0, 1.0, 0, ())
    from kleash.models.forward import Head

    ids, logp = sampler.draw(states, Head(torch.eye(4), None, 1.0, None), torch.Generator().manual_seed(0))
    expected = logits.softmax(-1)
    share = torch.bincount(ids, minlength=4) / len(ids)
    assert (share - expected).abs().max() < 4 * (0.25 / len(ids)) ** 0.5
    torch.testing.assert_close(logp, logits.log_softmax(-1)[ids])


def test_inverse_cdf_over_blocks_equals_a_plain_search_and_skips_zero_probability() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(50, 1000, generator=generator).pow(8)
    p[:, ::3] = 0.0
    p = p / p.sum(-1, keepdim=True)
    u = torch.rand(50, generator=generator)
    u[:2] = torch.tensor([0.0, 1.0 - 2**-24])
    ids = _inverse_cdf(p, u)
    assert (p.gather(1, ids[:, None]) > 0).all()
    running = p.double().cumsum(-1)
    plain = torch.searchsorted(running, (u.double() * running[:, -1])[:, None], right=True)[:, 0]
    assert (ids == plain)[2:].float().mean() > 0.97  # float32 block totals may move a boundary by one id


def test_top_p_and_top_k_renormalise_over_what_is_kept() -> None:
    """Report 34: p = (.5, .3, .15, .05), top-p 0.8 keeps two ids: log-prob of the first is −0.470004."""
    from kleash.models.forward import Head

    states = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(2000, 4)
    head = Head(torch.eye(4), None, 1.0, None)
    for sampler in (Sampler(1.0, 0.8, 0, ()), Sampler(1.0, 1.0, 2, ())):
        ids, logp = sampler.draw(states, head, torch.Generator().manual_seed(0))
        assert set(ids.tolist()) == {0, 1}
        assert float(logp[ids == 0][0]) == pytest.approx(-0.470004, abs=1e-5)


def test_take_and_group_layout() -> None:
    rollouts = sample(
        tiny("llama"), Tokens(), PROMPTS, n=2, max_new_tokens=4, columns={"answer": ["a", "b", "c"]}
    )
    assert rollouts.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert rollouts.columns["answer"] == ["a", "a", "b", "b", "c", "c"]
    batch = rollouts.to_batch()
    assert batch.group_size == 2 and batch.shared_prefix.tolist() == [3, 1, 5]
    odd = rollouts.take([0, 2, 3]).to_batch()
    assert odd.group_size == 1 and odd.shared_prefix is None


@pytest.mark.parametrize("whole", [False, True])
def test_cache_rows_can_be_selected(whole: bool) -> None:
    """Whole buffers hold zeros where nothing is written yet, also after they have grown."""
    cache = KeyValueCache(BLOCK + 8, whole)
    keys = torch.arange(2 * 1 * 3 * 2, dtype=torch.float32).view(2, 1, 3, 2)
    cache.update(keys, keys, 0)
    cache.select(torch.tensor([1, 1, 0]))
    new = torch.ones(3, 1, 1, 2)
    got, _ = cache.update(new, new, 0)
    assert torch.equal(got[:, :, :3], keys[[1, 1, 0]])
    assert torch.equal(got[:, :, 3:4], new)
    assert got.shape[2] == (BLOCK if whole else 4) and not got[:, :, 4:].any()
    long = torch.full((3, 1, BLOCK, 2), 2.0)
    grown, _ = cache.update(long, long, 0)
    assert torch.equal(grown[:, :, :4], got[:, :, :4]) and torch.equal(grown[:, :, 4 : BLOCK + 4], long)
    assert grown.shape[2] == (BLOCK + 8 if whole else BLOCK + 4) and cache.get_seq_length() == BLOCK + 4


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("n", 0),
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -1),
    ],
)
def test_options_out_of_range_are_named(option: str, value: float) -> None:
    with pytest.raises(UsageError, match=option):
        sample(tiny("llama"), Tokens(), PROMPTS, **{option: value})


def test_no_prompts_and_an_empty_prompt_are_named() -> None:
    model = tiny("llama")
    with pytest.raises(UsageError, match="prompts"):
        sample(model, Tokens(), [])
    with pytest.raises(UsageError, match="prompt 2 has no token"):
        sample(model, Tokens(), ["5", ""])


def test_vocabulary_of_the_families_matches_the_tests() -> None:
    assert all(tiny(name).config.vocab_size == VOCABULARY for name in FAMILIES)


def test_padded_prompts_stay_finite_and_close_in_bfloat16() -> None:
    """A left-padded position may look nowhere; in bfloat16 its mask must not overflow into NaN."""
    model, _ = load_model((tiny("llama"), None))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rollouts = sample(model, Tokens(), PROMPTS, n=4, max_new_tokens=6)
    exact, mask = batch_logprobs(model, rollouts.to_batch())
    assert torch.isfinite(rollouts.logp).all()
    assert (rollouts.logp - exact)[mask].abs().mean() < 0.1
