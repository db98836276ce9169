"""Wrong input fails at the top with a message that names the argument; and what the package promises."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import math
import pkgutil
import sys

import pytest
import torch

import kleash.functional as f

ROW, MATRIX, CUBE = torch.zeros(2), torch.zeros(2, 3), torch.zeros(2, 3, 4)
IDS = torch.zeros(2, 3, dtype=torch.long)
MODULES = [f"kleash.functional.{m.name}" for m in pkgutil.iter_modules(f.__path__)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: f.token_logprobs(MATRIX, IDS), r"logits must have 3 dimension"),
        (lambda: f.token_logprobs(CUBE, IDS[:, :2]), r"tokens must be \(2, 3\) of int64 ids, got \(2, 2\)"),
        (lambda: f.token_logprobs(CUBE, IDS.int()), r"int64 ids, got .* torch.int32"),
        (lambda: f.token_logprobs(CUBE, IDS + 4), r"ids in \[0, 4\), found 4 to 4"),
        (lambda: f.token_logprobs(CUBE, IDS - 100), r"found -100"),
        (lambda: f.sequence_logprob(ROW), r"logp must have 2 dimension"),
        (lambda: f.sequence_logprob(MATRIX, MATRIX), r"mask must be bool"),
        (lambda: f.sequence_logprob(MATRIX, MATRIX[:, :2] > 0), r"mask must be \(2, 3\)"),
        (lambda: f.sequence_logprob(MATRIX, reduction="avg"), r"one of sum, mean, got 'avg'"),
        (lambda: f.exact_kl(CUBE, CUBE[:, :, :3]), r"logits_ref and logits must have the same shape"),
        (lambda: f.kl_k1(ROW, MATRIX), r"logp_ref and logp must .* same shape, got \(2, 3\) and \(2,\)"),
        (lambda: f.kl_k3(IDS, IDS), r"logp must be floating point, got torch.int64"),
        (lambda: f.token_rewards(MATRIX, MATRIX, MATRIX, 0.1), r"score must have 1 dimension"),
        (lambda: f.token_rewards(torch.zeros(3), MATRIX, MATRIX, 0.1), r"score must be \(2,\)"),
        (lambda: f.token_rewards(torch.tensor([0, torch.nan]), MATRIX, MATRIX, 0.1), r"got nan at row 1"),
        (lambda: f.returns_to_go(ROW), r"rewards must have 2"),
        (lambda: f.gae(MATRIX, MATRIX[:, :2]), r"values and rewards must have the same shape"),
        (lambda: f.position_baseline(ROW), r"returns must have 2"),
        (lambda: f.group_advantages(ROW, 3), r"2 rewards do not split into groups of 3"),
        (lambda: f.group_advantages(MATRIX, 2), r"rewards must be \(N,\) or \(N/2, 2\)"),
        (lambda: f.group_advantages(ROW, 2, scale="var"), r"scale must be one of std, sample_std"),
        (lambda: f.group_advantages(ROW + torch.inf, 2), r"got inf at row 0"),
        (lambda: f.group_advantages(ROW, 2, groups=IDS), r"groups must be \(2,\)"),
        (lambda: f.group_advantages(torch.zeros(4), 2, groups=torch.tensor([5, 6, 5, 5])), r"group 5 has 3"),
        (lambda: f.whiten(MATRIX, ROW > 0), r"mask must be \(2, 3\)"),
        (lambda: f.reduce(MATRIX, reduction="mean"), r"reduction must be one of token-mean"),
        (lambda: f.reduce(MATRIX, reduction="constant"), r"length .* belongs to reduction='constant'"),
        (lambda: f.reduce(MATRIX, reduction="token-mean", length=3), r"belongs to .*'constant' alone"),
        (lambda: f.reinforce_loss(MATRIX, torch.zeros(3)), r"logp and advantages must have the same shape"),
        (lambda: f.clipped_surrogate(MATRIX, ROW), r"advantages and ratio must have the same shape"),
        (lambda: f.clipped_surrogate(ROW, ROW, epsilon=-0.1), r"epsilon must lie in \[0, 1\]"),
        (lambda: f.clip_shares(ROW, ROW, epsilon=1.1), r"epsilon must lie in \[0, 1\]"),
        (lambda: f.clip_shares(ROW, ROW, ROW), r"mask must be bool"),
        (lambda: f.clip_shares(ROW, MATRIX), r"advantages and ratio must have the same shape"),
        (lambda: f.cispo_objective(ROW, ROW, ROW, epsilon_high=-0.1), r"epsilon_high be at least 0, got"),
        (lambda: f.cispo_objective(ROW, MATRIX, ROW), r"ratio and logp must have the same shape"),
        (lambda: f.sapo_objective(ROW, MATRIX), r"advantages and ratio must have the same shape"),
        (lambda: f.sapo_objective(ROW, ROW, 0.0), r"temperature_negative must be above 0, got 0.0 and 1.05"),
        (lambda: f.importance_ratio(ROW, ROW), r"logp must have 2 dimension"),
        (lambda: f.importance_ratio(MATRIX, MATRIX[:, :2]), r"logp_old and logp must have the same shape"),
        (lambda: f.importance_ratio(MATRIX, MATRIX, MATRIX), r"mask must be bool"),
        (lambda: f.importance_ratio(MATRIX, MATRIX, level="row"), r"one of token, sequence, got 'row'"),
        (lambda: f.truncated_importance_weight(MATRIX, MATRIX[:1]), r"logp_sampler and logp_trainer must"),
        (lambda: f.truncated_importance_weight(MATRIX, MATRIX, 0.0), r"cap must be above 0, got 0.0"),
        (lambda: f.truncated_importance_weight(MATRIX, MATRIX, level="mean"), r"sequence-mean, got 'mean'"),
        (lambda: f.value_loss(MATRIX, ROW, MATRIX), r"values_old and values must have the same shape"),
        (lambda: f.value_loss(MATRIX, MATRIX, ROW), r"returns must have 2 dimension"),
        (lambda: f.value_loss(MATRIX, None, MATRIX), r"values_old is needed to clip around; clip=None"),
        (lambda: f.value_loss(MATRIX, MATRIX, MATRIX, clip=0.0), r"clip must be above 0, or None"),
        (lambda: f.value_loss(MATRIX, MATRIX, MATRIX, reduction="mean"), r"must be one of token-mean"),
        (lambda: f.kl_loss(ROW, ROW, "k1"), r"'k1' cannot be a loss: the expected gradient .* is zero"),
        (lambda: f.kl_loss(ROW, ROW, "exact"), r"estimator must be one of k2, k3, got 'exact'"),
        (lambda: f.kl_loss(ROW, MATRIX), r"logp_ref and logp must have the same shape"),
        (lambda: f.maxrl_advantages(torch.tensor([0.0, 1, -0.5, 1]), 2), r"at least 0 .*, got -0.5 at row 2"),
        (lambda: f.maxrl_advantages(ROW, 1), r"group_size must be at least 2"),
        (lambda: f.whiten(ROW, moments=ROW), r"moments must be \(3,\), .*, got shape \(2,\)"),
        (lambda: f.whiten(ROW + torch.inf), r"must be finite where the mask is True, got a sum of inf"),
        (lambda: f.whiten(ROW * torch.nan), r"values must be finite .*, got a sum of nan over 2 values"),
        (lambda: f.masked_moments(IDS), r"values must be floating point"),
        (lambda: f.overlong_penalty(ROW, 10, 0), r"buffer must lie in \[1, maximum\], got 0 with maximum 10"),
        (lambda: f.overlong_penalty(ROW, 10, 11), r"got 11 with maximum 10"),
        (lambda: f.missing_end_penalty(ROW, ROW, 1.0), r"\(2,\) of bool, got \(2,\) of torch.float32"),
        (lambda: f.missing_end_penalty(ROW, MATRIX > 0, 1.0), r"ended must be \(2,\) of bool, got \(2, 3\)"),
        (lambda: f.missing_end_penalty(ROW, ROW > 0, -1.0), r"penalty .* must be at least 0, got -1.0"),
        (lambda: f.adaptive_beta(0.0, 1.0, 6.0), r"beta must be above 0 and finite, got 0.0"),
        (lambda: f.adaptive_beta(0.1, 1.0, 0.0), r"target must be above 0"),
        (lambda: f.adaptive_beta(0.1, math.nan, 6.0), r"kl must be finite, got nan"),
        (lambda: f.adaptive_beta(0.1, 1.0, 6.0, clip=1.0), r"clip must lie in \(0, 1\)"),
        (lambda: f.adaptive_beta(0.1, 1.0, 6.0, horizon_steps=0), r"be at least 1, got 0.2 and 0"),
        (lambda: f.lagrangian_beta(-0.1, 1.0, 6.0, 0.1), r"beta must be at least 0, got -0.1"),
        (lambda: f.lagrangian_beta(0.1, math.inf, 6.0, 0.1), r"kl must be finite, got inf"),
        (lambda: f.lagrangian_beta(0.1, 1.0, -6.0, 0.1), r"delta must be above 0"),
        (lambda: f.lagrangian_beta(0.1, 1.0, 6.0, 0.0), r"rate must be above 0"),
        (lambda: f.bradley_terry_loss(ROW, torch.zeros(3)), r"rejected and chosen"),
        (lambda: f.bradley_terry_loss(ROW, ROW, reduction="avg"), r"one of mean, sum, none"),
        (lambda: f.dpo_loss(ROW, ROW, ROW, torch.zeros(3), 0.1), r"logp_ref_l and logp_w"),
        (lambda: f.dpo_loss(MATRIX, MATRIX, MATRIX, MATRIX, 0.1), r"logp_w must have 1 dimension"),
        (lambda: f.dpo_loss(ROW, ROW, ROW, ROW, 0.0), r"beta must be above 0, got 0.0"),
        (lambda: f.dpo_loss(ROW, ROW, ROW, ROW, 0.1, 0.5), r"label_smoothing must lie in \[0, 0.5\)"),
        (lambda: f.distillation_advantages(ROW, MATRIX), r"logp and logp_teacher"),
        (lambda: f.optimal_policy(ROW + 0.5, ROW, -1.0), r"beta must be above 0"),
        (lambda: f.optimal_policy(ROW + 0.4, ROW, 1.0), r"sum to 1"),
        (lambda: f.optimal_policy(torch.tensor([1.5, -0.5]), ROW, 1.0), r"non-negative"),
        (lambda: f.implicit_reward(ROW, MATRIX, 0.1), r"same shape"),
        (lambda: f.brier_score(ROW + 1.1, ROW), r"probs must lie in \[0, 1\], got 1.1"),
        (lambda: f.brier_score(ROW, ROW + 2), r"outcomes must be 0 or 1"),
        (lambda: f.brier_score(torch.zeros(0), torch.zeros(0)), r"probs is empty"),
        (lambda: f.expected_calibration_error(ROW, torch.zeros(3)), r"outcomes must be \(2,\)"),
        (lambda: f.expected_calibration_error(ROW, ROW, bins=0), r"bins must be at least 1"),
        (lambda: f.fit_overoptimization(ROW, ROW), r"needs three points"),
        (lambda: f.fit_overoptimization(torch.tensor([0.0, 1.0, 1.0]), torch.arange(3.0)), r"two different"),
        (lambda: f.fit_overoptimization(torch.tensor([-0.1, 1.0, 2.0]), torch.arange(3.0)), r"be negative"),
        (lambda: f.fit_overoptimization(torch.arange(3.0), torch.ones(3)), r"gold does not vary"),
        (lambda: f.fit_overoptimization(torch.arange(3.0), torch.arange(3.0), form="ppo"), r"one of rl, bon"),
        (lambda: f.fit_overoptimization(torch.arange(3.0), torch.full((3,), torch.nan)), r"must be finite"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_examples_are_found():
    assert sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES) > 30


@pytest.mark.parametrize("name", MODULES)
def test_imports_torch_and_the_standard_library_alone(name):
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            roots = [] if node.level == 1 else [str(node.module).split(".")[0]]
            assert node.level <= 1, f"{name} reaches outside the package"
        else:
            continue
        for root in roots:
            assert root == "torch" or root in sys.stdlib_module_names, f"{name} imports {root}"


PUBLIC = {
    "token_logprobs": "logits tokens",
    "sequence_logprob": "logp mask reduction",
    "exact_kl": "logits logits_ref mask",
    "kl_k1": "logp logp_ref",
    "kl_k2": "logp logp_ref",
    "kl_k3": "logp logp_ref",
    "token_rewards": "score logp logp_ref beta mask",
    "returns_to_go": "rewards mask gamma",
    "position_baseline": "returns mask",
    "reinforce_loss": "logp advantages mask reduction",
    "clipped_surrogate": "ratio advantages epsilon epsilon_high",
    "cispo_objective": "logp ratio advantages epsilon epsilon_high",
    "sapo_objective": "ratio advantages temperature_positive temperature_negative",
    "importance_ratio": "logp logp_old mask level",
    "truncated_importance_weight": "logp_trainer logp_sampler cap mask level",
    "clip_shares": "ratio advantages mask epsilon epsilon_high",
    "value_loss": "values values_old returns clip mask reduction length",
    "kl_loss": "logp logp_ref estimator mask",
    "adaptive_beta": "beta kl target horizon_steps clip",
    "lagrangian_beta": "beta kl delta rate",
    "overlong_penalty": "lengths maximum buffer",
    "missing_end_penalty": "score ended penalty",
    "masked_moments": "values mask",
    "whiten": "values mask shift moments",
    "gae": "rewards values gamma lam mask",
    "group_advantages": "rewards group_size scale",
    "leave_one_out_advantages": "rewards group_size",
    "maxrl_advantages": "rewards group_size groups",
    "bradley_terry_loss": "chosen rejected margin center reduction",
    "dpo_loss": "logp_w logp_l logp_ref_w logp_ref_l beta",
    "distillation_advantages": "logp_teacher logp",
    "optimal_policy": "ref_probs rewards beta",
    "implicit_reward": "logp logp_ref beta",
    "fit_overoptimization": "kl gold form",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_names_and_argument_order_are_those_promised(name):
    parameters = list(inspect.signature(getattr(f, name)).parameters)
    want = PUBLIC[name].split()
    assert parameters[: len(want)] == want


def test_every_public_name_is_documented():
    for name in f.__all__:
        assert inspect.getdoc(getattr(f, name)), name
