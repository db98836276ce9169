"""The whole measurement on tiny models: right numbers, every convention said, every wrong request refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kleash.errors import RunError, UsageError
from kleash.measure import METRICS, Evaluation, Judges, evaluate_rollouts, measure
from kleash.models import RewardModel
from kleash.sampling import sample

Model = PreTrainedModel
Run = Callable[..., Evaluation]
Make = Callable[..., PreTrainedModel]
WORDS = ("<s>", "</s>", "sun", "moon", "star")
PROMPTS = ["sun moon", "star", "moon moon sun"]


def stars(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    return [float(response.split().count("star")) for response in responses]


@pytest.fixture
def run(tokenizer: PreTrainedTokenizerFast) -> Run:
    def measured(policy: Any, reference: Any, **options: Any) -> Evaluation:
        defaults = {"prompts": PROMPTS, "n": 4, "max_new_tokens": 3, "sampling_dtype": "float32"}
        return measure((policy, tokenizer), reference=reference, **(defaults | options))

    return measured


def test_a_policy_has_exactly_zero_drift_from_itself(run: Run, policy: Model, make_model: Make) -> None:
    for temperature, fixed_length in ((1.0, False), (0.7, True)):
        found = run(policy, make_model(1), temperature=temperature, fixed_length=fixed_length)
        for name in ("drift", "kl_k1", "kl_k2", "kl_k3"):
            assert getattr(found, name).mean == 0.0, name
        assert all(value == 0.0 for sample in found.samples for value in sample.kl)


def test_report_1_dropout_is_off_while_measuring_and_the_mode_comes_back(
    run: Run, tokenizer: PreTrainedTokenizerFast, make_model: Make
) -> None:
    policy, reference = (make_model(1, attention_dropout=0.5).train() for _ in range(2))
    found = run(policy, reference)
    assert found.drift is not None and found.drift.mean == 0.0
    assert policy.training and reference.training


def test_every_number_can_be_recomputed_from_the_samples(run: Run, policy: Model, reference: Model) -> None:
    found = run(policy, reference, reward=stars, gold=lambda responses: [float(len(r)) for r in responses])
    assert len(found.samples) == 12 and found.prompts == 3 and found.samples_per_prompt == 4
    for metric in ("drift", "kl_k1", "reward", "gold", "length", "distinct_bigrams"):
        by_prompt = found.by_prompt(metric)
        estimate = getattr(found, metric)
        assert estimate.mean == pytest.approx(sum(by_prompt.values()) / len(by_prompt), abs=1e-4), metric
    for one in found.samples:
        assert one.reward == one.response.split().count("star")
        assert one.gold == len(one.response)
        assert one.tokens == [WORDS[i] for i in one.ids]
        assert len(one.logp) == len(one.logp_ref) == len(one.kl) == len(one.ids)
        assert one.ended == (one.ids[-1] == 1)
        assert one.prompt == PROMPTS[one.group]
    assert found.ended == sum(one.ended for one in found.samples) / 12
    assert found.sampler_gap is not None and found.sampler_gap < 1e-5
    assert found.missing == {"reward": 0, "gold": 0}


def test_fixed_length_removes_the_end_token_for_both(run: Run, policy: Model, reference: Model) -> None:
    found = run(policy, reference, fixed_length=True)
    assert found.length is not None and found.length.mean == 3.0 and found.length.stderr == 0.0
    assert found.ended is None and found.fixed_length
    assert "removed before the softmax of both models (ids [1])" in found.conventions["end_token"]
    assert found.entropy is not None and 0 < found.entropy.mean < math.log(4)


def test_conventions_say_what_another_library_might_do_otherwise(
    run: Run, policy: Model, reference: Model, make_model: Make
) -> None:
    said = run(policy, reference, reward=stars, temperature=0.8).conventions
    assert said["sampling_distribution"] == "policy"
    assert said["temperature"] == 0.8
    assert said["reward"] == "stars" and said["gold"] is None
    assert said["reference"] == run(policy, make_model(2)).conventions["reference"]
    assert said["reference"] != run(policy, make_model(3)).conventions["reference"]
    for name in ("kl_k1", "kl_k2", "kl_k3"):  # row 004-31: a sampled number is never called KL alone
        assert said[name].startswith("sampled")


def test_the_same_seed_gives_the_same_evaluation(run: Run, policy: Model, reference: Model) -> None:
    one, same, other = (run(policy, reference, seed=seed) for seed in (5, 5, 6))
    assert [s.ids for s in one.samples] == [s.ids for s in same.samples]
    assert one.drift == same.drift
    assert [s.ids for s in one.samples] != [s.ids for s in other.samples]
    assert one.prompts_hash == other.prompts_hash != run(policy, reference, prompts=PROMPTS[:2]).prompts_hash


def test_json_round_trip(run: Run, policy: Model, reference: Model) -> None:
    found = run(policy, reference, reward=[stars, "length:2"], gold=lambda responses: [None] + [1.0] * 11)
    text = json.dumps(found.to_json(), allow_nan=False)
    assert Evaluation.from_json(json.loads(text)) == found
    short = json.loads(json.dumps(found.to_json(samples=False)))
    assert "samples" not in short
    lines = [s.to_json() | {"step": 7, "policy": "dpo"} for s in found.samples]
    assert Evaluation.from_json(short | {"verdict": {}}, samples=lines) == found
    assert Evaluation.from_json(short).drift == found.drift


def test_parts_of_a_combined_reward_are_estimated_alone(run: Run, policy: Model, reference: Model) -> None:
    found = run(policy, reference, reward={stars: 0.5, "length:2": -1.0})
    parts = found.reward_parts
    assert list(parts) == ["stars", "length"] and found.reward is not None
    assert found.reward.mean == pytest.approx(0.5 * parts["stars"].mean - parts["length"].mean)  # type: ignore[union-attr]


def test_report_47_missing_scores_are_counted_and_left_out(run: Run, policy: Model, reference: Model) -> None:
    found = run(policy, reference, reward=lambda responses: [None] * 4 + [2.0] * 8)
    assert found.missing == {"reward": 4}
    assert found.reward is not None and (found.reward.mean, found.reward.count) == (2.0, 8)
    assert found.by_prompt("reward") == {1: 2.0, 2: 2.0}
    assert found.warnings == ["4 of 12 responses have no reward; they are left out of its mean"]
    nothing = run(policy, reference, reward=lambda responses: [None] * 12)
    assert nothing.reward is None and nothing.missing == {"reward": 12}


def test_unfinished_responses_may_be_left_out_of_the_scores(
    run: Run, policy: Model, reference: Model
) -> None:
    kept, left_out = (
        run(policy, reference, reward=stars, score_unfinished=keep, n=8) for keep in (True, False)
    )
    unfinished = sum(not one.ended for one in kept.samples)
    assert 0 < unfinished < 24
    assert kept.missing == {"reward": 0} and left_out.missing == {"reward": unfinished}
    assert kept.drift == left_out.drift
    assert left_out.conventions["unfinished"] == "no reward and no gold, counted as missing"


def test_columns_of_the_rows_reach_the_reward(run: Run, policy: Model, reference: Model) -> None:
    rows = [{"prompt": "sun", "answer": "star"}, {"prompt": "moon", "answer": "moon"}]
    seen: list[tuple[str, str]] = []

    def grade(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
        seen.extend(zip(prompts, answer, strict=True))
        return [0.0] * len(responses)

    run(policy, reference, prompts=rows, reward=grade, n=2)
    assert seen == [("sun", "star")] * 2 + [("moon", "moon")] * 2


@pytest.mark.parametrize("role", ["reward", "gold"])
@pytest.mark.parametrize("combined", [False, True])
def test_a_column_that_the_prompts_lack_is_said_before_sampling(
    role: str, combined: bool, run: Run, policy: Model, reference: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grade(responses: list[str], answer: list[str]) -> list[float]:
        return [0.0] * len(responses)

    monkeypatch.setattr("kleash.measure.policy.sample", lambda *arguments, **options: pytest.fail("sampled"))
    judge = [stars, grade] if combined else grade
    rows = [{"prompt": "sun", "anwser": "star"}]
    with pytest.raises(UsageError, match=f"{role} grade needs answer, but what it can be given is: anwser, "):
        run(policy, reference, prompts=rows, **{role: judge})


def test_prompts_from_a_file(run: Run, policy: Model, reference: Model, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "sun"}\n{"prompt": "moon star"}\n', encoding="utf-8")
    assert run(policy, reference, prompts=str(file)).prompts == 2


def test_a_prompt_that_fills_the_window_is_dropped_with_a_note(
    run: Run, policy: Model, reference: Model
) -> None:
    found = run(policy, reference, prompts=["sun", " ".join(["moon"] * 70)])
    assert found.prompts == 1
    assert len(found.warnings) == 1 and found.warnings[0].startswith("1 prompts dropped")
    with pytest.raises(UsageError, match="leaves no room for a prompt in the model's window of 64"):
        run(policy, reference, max_new_tokens=64)
    with pytest.raises(UsageError, match="1 longer than max_length"):
        run(policy, reference, prompts=[" ".join(["moon"] * 70)])


def test_a_reward_model_scores_the_sampled_ids(
    run: Run, policy: Model, reference: Model, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    judge = RewardModel.from_policy(policy, make_tokenizer())
    torch.nn.init.normal_(judge.score.weight)
    with pytest.raises(UsageError, match="standardise_reward=false"):
        run(policy, reference, reward=judge)
    raw = run(policy, reference, reward=judge, standardise_reward=False)
    assert raw.reward is not None and raw.reward.stderr
    judge.meta |= {"mean": 0.5, "std": 2.0}
    scaled = run(policy, reference, reward=judge)
    assert scaled.reward is not None
    assert scaled.reward.mean == pytest.approx((raw.reward.mean - 0.5) / 2.0, abs=1e-5)
    stranger = RewardModel.from_policy(policy, make_tokenizer((*WORDS, "sky")))
    with pytest.raises(UsageError, match="is not the policy's"):
        run(policy, reference, reward=stranger, standardise_reward=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0: drift is measured on samples"),
        ({"reference": None}, "reference: drift needs a model to be measured from"),
        ({"fixed_length": True, "score_unfinished": False}, "leaves nothing to score"),
        ({"reward": "nowhere.py:grade"}, "there is no file nowhere.py"),
        ({"prompts": []}, "."),
    ],
)
def test_wrong_requests_are_refused(
    run: Run, policy: Model, reference: Model, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(policy, **({"reference": reference} | options))


def test_a_reference_of_another_vocabulary_is_refused(run: Run, policy: Model, make_model: Make) -> None:
    with pytest.raises(UsageError, match="it has 7 tokens and the policy 5"):
        run(policy, make_model(2, vocab_size=7))


def test_row_000_04_samples_of_another_policy_are_refused(
    policy: Model, reference: Model, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = [[0, 2, 3], [0, 4]]
    theirs = sample(reference, tokenizer, ids, n=4, max_new_tokens=3)
    with pytest.raises(UsageError, match="drawn from another policy or cut by top-p or top-k"):
        evaluate_rollouts(policy, reference, tokenizer, theirs)
    ours = sample(policy, tokenizer, ids, n=4, max_new_tokens=3)
    found = evaluate_rollouts(policy, reference, tokenizer, ours, Judges(reward=stars))
    assert found.drift is not None and found.drift.mean > 0 and found.reward is not None


def test_report_34_samples_cut_by_top_p_are_refused(
    policy: Model, reference: Model, tokenizer: PreTrainedTokenizerFast
) -> None:
    cut = sample(policy, tokenizer, [[0, 2]], n=8, max_new_tokens=3, top_p=0.5)
    with pytest.raises(UsageError, match="top-p"):
        evaluate_rollouts(policy, reference, tokenizer, cut)


def test_a_model_that_diverged_is_reported_not_averaged(run: Run, policy: Model, make_model: Make) -> None:
    broken = make_model(2)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    with pytest.raises(RunError, match="drift of response 1 of 12 .* not finite"):
        run(policy, broken)


def test_the_package_and_the_public_function_share_a_name(
    policy: Model, reference: Model, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    import kleash.measure

    options: dict[str, Any] = {"prompts": PROMPTS, "n": 1, "max_new_tokens": 2}
    found = kleash.measure((policy, make_tokenizer()), reference=reference, **options)  # type: ignore[operator]
    assert isinstance(found, Evaluation)
    assert all(hasattr(found, name) for name in METRICS)
