"""Where each method ends: its own advantages and loss on every group of a four-armed bandit, so that a step
is the expected gradient, against the optimum that the theory gives.

β-regularised, the optimum of E[r] − β·KL is `optimal_policy` (seed 004, Eq. 8). Methods that climb something
else end where that is level; the condition stands in each test, w(y) = P(r < r(y)) − P(r > r(y)) under the
policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from enumerated import World, bandit, expected_loss, make_config
from torch import Tensor

from kleash.functional import optimal_policy
from kleash.methods.group import TABLE
from kleash.models import load_model
from kleash.training import train

BETA = 0.5
REWARD_KL = {"kl_in": "reward", "kl_estimator": "k1"}
EXACT = {"kl_in": "loss", "kl_estimator": "exact"}
K2, K3 = {**EXACT, "kl_estimator": "k2"}, {**EXACT, "kl_estimator": "k3"}


def end(
    name: str, world: World, size: int = 2, steps: int = 60, rate: float = 0.2, beta: float = BETA,
    **changes: Any,
) -> Tensor:  # fmt: skip
    """(4,) the policy after `steps` of Adam on the expected loss, at a rate that falls to 0."""
    config = make_config(name, world, size, beta=beta, **changes)
    optimizer = torch.optim.Adam(world.parameters, betas=(0.8, 0.95))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        expected_loss(name, world, size, config, side_by_side=False).backward()
        optimizer.step()
    return world.probs().detach()


def optimum(world: World, beta: float = BETA, scores: Tensor | None = None) -> Tensor:
    """(4,) the optimal policy of the world's scores, or of others."""
    return optimal_policy(world.ref_probs, world.scores.double() if scores is None else scores, beta)[0]


def won(world: World, probs: Tensor) -> Tensor:
    """(4,) w(y): how often a response beats another of the policy, minus how often it loses."""
    return (world.scores[:, None] - world.scores).sign().double() @ probs


def apart(p: Tensor, q: Tensor) -> float:
    """Total variation."""
    return float((p - q).abs().sum() / 2)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {"baseline": "none"}),
    ("reinforce", {"baseline": "leave-one-out"}),
    ("rloo", REWARD_KL),
    ("dr-grpo", REWARD_KL),
    ("ppo", REWARD_KL),
    ("rloo", EXACT),
    ("rloo", K2),
    ("ppo", EXACT),
]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{n}-{'-'.join(c.values())}" for n, c in CASES])
def test_004_37_it_ends_at_the_optimal_policy(name: str, changes: dict[str, Any]) -> None:
    """With the KL in the loss too: where responses have one token, the states visited cannot move."""
    world = bandit()
    assert apart(world.probs().detach(), optimum(world)) > 0.3
    got = end(name, world, 1 if name == "ppo" or changes.get("baseline") == "none" else 2, **changes)
    assert apart(got, optimum(world)) < 0.01


@pytest.mark.parametrize("estimator", ["exact", "k2"])
def test_dr_grpo_with_the_kl_in_the_loss_ends_where_beta_is_larger(estimator: str) -> None:
    """The group mean leaves (1 − 1/G) of E[r] and all of the KL: the optimum of β·G/(G − 1)."""
    world = bandit()
    got = end("dr-grpo", world, kl_in="loss", kl_estimator=estimator)
    assert apart(got, optimum(world, 2 * BETA)) < 0.01
    assert apart(got, optimum(world)) > 0.1


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "sapo"])
def test_divided_by_the_deviation_with_the_kl_in_the_loss(name: str) -> None:
    """π ∝ π_ref·e^(w/β): of the scores nothing but their order is left in groups of two."""
    world = bandit((0.0, 1.0, 0.1, 0.9))
    got = end(name, world, beta=1.0, **EXACT)
    assert apart(got, optimum(world, 1.0, won(world, got))) < 0.01
    assert apart(got, optimum(world, 1.0)) > 0.05


def test_grpo_as_published() -> None:
    """The deviation and k3, which pulls the reference to the policy: β·(π_ref − π) + π·w = 0."""
    world = bandit()
    got = end("grpo", world)
    torch.testing.assert_close(BETA * (got - world.ref_probs), got * won(world, got), atol=1e-3, rtol=0)
    assert apart(got, optimum(world)) > 0.1


def test_k3_in_the_loss_ends_elsewhere() -> None:
    """π·(β + E[r] − r) = β·π_ref: its pull is that of KL(reference‖policy)."""
    world = bandit()
    got = end("rloo", world, **K3)
    scores = world.scores.double()
    torch.testing.assert_close(
        got * (BETA + got @ scores - scores), BETA * world.ref_probs, atol=1e-3, rtol=0
    )
    assert apart(got, optimum(world)) > 0.02


@pytest.mark.parametrize("size", [2, 3])
def test_maxrl_weighs_rare_success_more(size: int) -> None:
    """Right or wrong, p in all right: the optimum for f·r, f = Σ_{k<G-1} (1 − p)^k, which nears r/p."""
    world = bandit((0.0, 0.0, 1.0, 0.0))
    got = end("maxrl", world, size, **EXACT)
    scores, p = world.scores.double(), float(got @ world.scores.double())
    worth = sum((1 - p) ** k for k in range(size - 1))
    assert apart(got, optimum(world, scores=worth * scores)) < 0.01
    assert (apart(got, optimum(world)) > 0.05) == (size == 3), "with two, f is 1"


@pytest.mark.parametrize("name", ["reinforce", "ppo", *TABLE])
def test_without_kl_it_ends_at_the_best_response(name: str) -> None:
    world = bandit()
    got = end(name, world, steps=40, rate=0.5, beta=0.0)
    assert got[int(world.scores.argmax())] > 0.99


@pytest.mark.parametrize("kl_in", [REWARD_KL, EXACT], ids=["reward", "loss"])
def test_report_36_a_higher_beta_ends_nearer_the_reference(kl_in: dict[str, str]) -> None:
    world = bandit()
    drifts = []
    for beta in (0.1, 0.5, 2.5):  # each goes on where the one before ended
        end("rloo", world, beta=beta, steps=20, **kl_in)
        drifts.append(float(world.kl.detach()))
    assert drifts[0] > 1.5 * drifts[1] > 4 * drifts[2] > 0, drifts


@pytest.mark.parametrize(
    ("name", "changes"),
    [("rloo", {"batch_size": 128}), ("ppo", {"batch_size": 64, "whiten": False, "minibatches": 1})],
    ids=["rloo", "ppo"],
)
def test_a_sampled_run_ends_near_the_optimal_policy(
    name: str, changes: dict[str, Any], tiny: Any, tmp_path: Path
) -> None:
    """`kleash.train` on one prompt and responses of one word: 0 for `good`, half a point for `bad`."""
    score = {"good": 1.0, "bad": 0.5}
    run = train(
        name,
        **tiny.options(
            name, tmp_path / "run", data=[{"prompt": "the cat"}] * 32, eval_fraction=0.0, max_new_tokens=1,
            fixed_length=True, reward=lambda responses: [score.get(r.strip(), 0.0) for r in responses],
            beta=0.25, steps=30, learning_rate=5e-3, log_every=30, **changes,
        ),
    )  # fmt: skip
    tokenizer = tiny.tokenizer()
    ids = tokenizer("the cat", return_tensors="pt")["input_ids"]
    policy, reference = (m(ids).logits[0, -1].detach() for m in (load_model(run.path)[0], tiny.model()))
    keep = torch.arange(len(policy)) != tokenizer.eos_token_id
    scores = torch.tensor([score.get(tokenizer.decode([i]).strip(), 0.0) for i in range(len(policy))])[keep]
    best, _ = optimal_policy(reference[keep].softmax(-1), scores, 0.25)
    assert apart(policy[keep].softmax(-1), best) < 0.1
    assert apart(reference[keep].softmax(-1), best) > 0.5
