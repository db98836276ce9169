"""Exact drift against the definition, by listing every response of a tiny vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kleash.data.items import PromptIds
from kleash.measure import Sample, measure, rollout_kl, worst_token
from kleash.measure.drift import _chunks, response_sums
from kleash.sampling import Rollouts

END, STEPS, VOCABULARY = 1, 3, 5
PROMPT = [0, 2, 3]


def responses(fixed_length: bool) -> list[list[int]]:
    """Every response of at most STEPS tokens: it stops at the end token, or has no end token at all."""
    if fixed_length:
        return [list(ids) for ids in product([i for i in range(VOCABULARY) if i != END], repeat=STEPS)]
    found = set()
    for ids in product(range(VOCABULARY), repeat=STEPS):
        cut = ids.index(END) + 1 if END in ids else STEPS
        found.add(ids[:cut])
    return [list(ids) for ids in sorted(found)]


def as_rollouts(
    rows: list[list[int]], temperature: float, forbidden: tuple[int, ...], group: int = 1
) -> Rollouts:
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [0] * (STEPS - len(row)) for row in rows])
    prompt = torch.tensor([PROMPT] * len(rows))
    return Rollouts(
        prompt_ids=prompt,
        prompt_mask=torch.ones_like(prompt, dtype=torch.bool),
        response_ids=ids,
        response_mask=torch.arange(STEPS) < lengths[:, None],
        logp=torch.zeros(len(rows), STEPS),
        ended=ids.eq(END).any(1),
        group=torch.arange(len(rows)) // group,
        prompts=[""] * len(rows),
        responses=[""] * len(rows),
        temperature=temperature,
        forbidden=forbidden,
    )


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel, rows: list[list[int]], temperature: float, forbidden: tuple[int, ...]
) -> torch.Tensor:
    """log p(y|x) of every response from the model's own logits, one row at a time: the slow twin."""
    found = []
    for row in rows:
        logits = model(torch.tensor([PROMPT + row])).logits[0].double()
        logits[:, list(forbidden)] = -torch.inf
        logp = (logits / temperature).log_softmax(-1)
        found.append(sum(logp[len(PROMPT) - 1 + t, token] for t, token in enumerate(row)))
    return torch.stack(found)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("fixed_length", [True, False])
def test_enumeration_mean_drift_is_the_sequence_kl(
    policy: PreTrainedModel, reference: PreTrainedModel, fixed_length: bool, temperature: float
) -> None:
    """Row 004-24: E_y[Σ_t KL_t] = KL(policy‖reference); 000-02: the means of k1 and k3 too, of k2 not."""
    forbidden = (END,) if fixed_length else ()
    rows = responses(fixed_length)
    logp = sequence_logprobs(policy, rows, temperature, forbidden)
    logp_ref = sequence_logprobs(reference, rows, temperature, forbidden)
    weights = logp.exp()
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0, dtype=torch.float64))
    exact = (weights * (logp - logp_ref)).sum()
    assert exact > 0.3, "the two models must differ for the test to mean anything"
    sums = response_sums(rollout_kl(policy, reference, as_rollouts(rows, temperature, forbidden)))
    means = {name: (weights * values).sum() for name, values in sums.items()}
    for name in ("drift", "kl_k1", "kl_k3"):
        torch.testing.assert_close(means[name], exact, atol=1e-5, rtol=1e-5)
    assert (means["kl_k2"] - exact).abs() > 1e-3


def test_estimates_agree_with_the_enumerated_kl(
    policy: PreTrainedModel, reference: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Exact drift, k1 and k3 of sampled responses lie within four standard errors of the KL of the
    definition.
    """
    rows = responses(False)
    logp, logp_ref = (sequence_logprobs(model, rows, 1.0, ()) for model in (policy, reference))
    exact = float((logp.exp() * (logp - logp_ref)).sum())
    prompts = [PromptIds(PROMPT, "sun moon") for _ in range(150)]
    found = measure(
        (policy, tokenizer),
        reference=reference,
        prompts=prompts,
        n=2,
        max_new_tokens=STEPS,
        sampling_dtype="float32",
        seed=3,
    )
    for estimate in (found.drift, found.kl_k1, found.kl_k3):
        assert estimate is not None and estimate.stderr is not None
        assert 0 < estimate.stderr < 0.2 * exact
        assert abs(estimate.mean - exact) < 4 * estimate.stderr
    assert found.drift is not None and found.kl_k1 is not None
    assert found.drift.stderr < found.kl_k1.stderr  # type: ignore[operator]
    assert found.warnings == []


def test_row_000_04_other_samples_do_not_give_this_kl(
    policy: PreTrainedModel, reference: PreTrainedModel
) -> None:
    rows = responses(False)
    weights = sequence_logprobs(reference, rows, 1.0, ()).exp()
    logp = sequence_logprobs(policy, rows, 1.0, ())
    exact = (logp.exp() * (logp - weights.log())).sum()
    drift = response_sums(rollout_kl(policy, reference, as_rollouts(rows, 1.0, ())))["drift"]
    assert ((weights * drift).sum() - exact).abs() > 1e-2


def test_report_2_drift_does_not_depend_on_the_batch(
    policy: PreTrainedModel, reference: PreTrainedModel
) -> None:
    rows = responses(False)[:24]
    rollouts = as_rollouts(rows, 1.0, (), group=4)
    whole = rollout_kl(policy, reference, rollouts, batch_rows=100)
    for batch_rows in (1, 3, 4, 8, 10):
        part = rollout_kl(policy, reference, rollouts, batch_rows=batch_rows)
        for name in ("kl", "logp", "logp_ref", "entropy", "mask"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name), atol=1e-5, rtol=1e-5)


def test_a_policy_has_not_drifted_from_itself(
    policy: PreTrainedModel, make_model: Callable[..., PreTrainedModel]
) -> None:
    copy = make_model(1)
    stats = rollout_kl(policy, copy, as_rollouts(responses(False), 0.7, ()))
    assert stats.mask.any()
    for name, values in response_sums(stats).items():
        assert torch.equal(values, torch.zeros_like(values)), name


def test_chunks_keep_groups_whole_where_they_fit() -> None:
    rollouts = as_rollouts([[2, 3, 4]] * 6, 1.0, (), group=2)
    assert _chunks(rollouts, 4) == [[0, 1, 2, 3], [4, 5]]
    assert _chunks(rollouts, 3) == [[0, 1], [2, 3], [4, 5]]
    assert _chunks(rollouts, 1) == [[i] for i in range(6)]


def test_progress_reaches_the_total(policy: PreTrainedModel, reference: PreTrainedModel) -> None:
    seen: list[tuple[int, int]] = []
    rollouts = as_rollouts([[2, 3, 4]] * 6, 1.0, (), group=2)
    rollout_kl(
        policy, reference, rollouts, batch_rows=4, progress=lambda done, total, _: seen.append((done, total))
    )
    assert seen == [(4, 6), (6, 6)]


def test_report_41_the_token_that_blew_up_is_found_with_its_share() -> None:
    def row(kl: list[float]) -> Sample:
        tokens = [f"t{i}" for i in range(len(kl))]
        return Sample("", "", tokens, list(range(len(kl))), kl, kl, kl, None, None, False, 0)

    worst = worst_token([row([0.0] * 100), row([0.0] * 60 + [6.0] + [0.0] * 39)])
    assert worst is not None
    assert (worst.sample, worst.position, worst.token, worst.kl, worst.share) == (1, 60, "t60", 6.0, 1.0)
    assert worst_token([row([0.0, 0.0])]) is None
    assert worst_token([]) is None
