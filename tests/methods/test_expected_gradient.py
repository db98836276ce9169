"""What each method climbs: its expected gradient, by listing every group of responses, against the exact
derivative of the objective that it stands for.

T is the length of a response, G the size of a group, r the score. With the options below, at ratio 1,

  reinforce, ppo (λ = γ = 1, no values)    E[r] − β·KL                 KL of whole responses, in the reward
  rloo                                     E[r] − β·KL
  dr-grpo                                  (1 − 1/G)/T · (E[r] − β·KL)
  grpo, gspo, cispo, sapo, G = 2           1/T · E[P(r > r′) − P(r < r′)], the opponent held fixed
  dapo, G = 2                              the same, given that the two scores differ
  maxrl, r = 0 or 1                        Σ_{k<G-1} (1 − p)^k · p, factors held fixed: to ∇log p in the limit

token-mean, sequence-token-mean and constant divide by T what sequence-mean gives. A KL in the loss adds
β/T times the gradient of the next token's KL at the states visited, which the derivative holds fixed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from enumerated import World, bandit, collect_all, expected_loss, group_probs, make_config, transformer
from torch import Tensor

from kleash.methods import METHODS
from kleash.methods.group import TABLE

BETA = 0.3
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 2e-7}  # scores, and what is derived from them, are float32
STD = [name for name, row in TABLE.items() if row.scale == "std"]
REWARD_KL = {"beta": BETA, "kl_in": "reward", "kl_estimator": "k1"}
LOSS_KL = {"beta": BETA, "kl_in": "loss", "kl_estimator": "k2"}


def climbed(name: str, world: World, size: int, side_by_side: bool = True, **changes: Any) -> Tensor:
    """Minus the expected gradient of the loss."""
    config = make_config(name, world, size, **changes)
    return -world.gradient(expected_loss(name, world, size, config, side_by_side))


def objective(name: str, world: World, size: int, beta: float) -> Tensor:
    """What the table above says of a method, as a scalar to differentiate."""
    length = world.responses.shape[1]
    if name in ("reinforce", "ppo", "rloo"):
        return world.expected(world.scores.double()) - beta * world.kl
    if name == "dr-grpo":
        return (1 - 1 / size) / length * (world.expected(world.scores.double()) - beta * world.kl)
    assert name in STD and size == 2
    probs, sign = world.probs().detach(), (world.scores[:, None] - world.scores).sign().double()
    won = world.expected(sign @ probs) / length
    if name != "dapo":
        return won - beta / length * world.state_kl()
    spread = (world.scores[:, None] != world.scores).double()
    share = probs @ spread @ probs
    # k2 of what is left: responses are no longer those of the policy, and it is no longer the KL's gradient.
    gaps = world.token_logps(world.policy) - world.token_logps(world.reference).detach()
    k2 = probs * (spread @ probs) @ (gaps.square() / 2).sum(1)
    return (won - beta / length * k2) / share


@pytest.mark.parametrize(("steps", "beta"), [(2, 0.0), (3, BETA)])
@pytest.mark.parametrize("name", ["reinforce", "ppo", "rloo", "dr-grpo", *STD])
def test_004_34_expected_gradient_over_all_groups_of_a_transformer(
    name: str, steps: int, beta: float
) -> None:
    """64 responses of three tokens, 4,096 groups of two. At ratio 1 the clip, the clipped weight and the
    soft gate are one gradient.
    """
    world, size = transformer(steps), 2
    changes = {"reinforce": {"baseline": "none"}, "ppo": {"reduction": "sequence-mean"}}.get(name, {})
    if name in ("reinforce", "ppo"):
        size = 1
    kl = {} if name == "reinforce" else REWARD_KL if name not in STD else LOSS_KL
    kl = {**kl, "beta": beta}
    got = climbed(name, world, size, side_by_side=False, **kl, **changes)
    want = world.gradient(objective(name, world, size, beta))
    assert want.norm() > 0.1
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["rloo", "dr-grpo"])
def test_expected_gradient_by_group_size(name: str, size: int) -> None:
    """All groups of two and of three, side by side behind their prompt: leave-one-out is unbiased, the group
    mean shrinks by 1 − 1/G.
    """
    world = bandit()
    got = climbed(name, world, size, **REWARD_KL)
    torch.testing.assert_close(got, world.gradient(objective(name, world, size, BETA)), **CLOSE)


def normalised(world: World, size: int) -> Tensor:
    """(K,) expected (score − mean)/deviation of each response in a group with all possible others, by plain
    arithmetic; 0 in a group without spread.
    """
    probs, numbers = world.probs().detach().tolist(), world.scores.tolist()
    out = []
    for mine in numbers:
        total = 0.0
        for others in itertools.product(range(len(numbers)), repeat=size - 1):
            group = [mine, *(numbers[i] for i in others)]
            if max(group) > min(group):
                share = (mine - statistics.fmean(group)) / statistics.pstdev(group)
                total += share * float(torch.tensor([probs[i] for i in others]).prod())
        out.append(total)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("name", [name for name in STD if name != "dapo"])
def test_divided_by_the_deviation_it_is_not_the_expected_score(name: str) -> None:
    """Groups of three: the expected normalised advantage, response by response; not a multiple of ∇E[r]."""
    world = bandit((0.0, 5.0, 0.25, 0.5))
    got = climbed(name, world, 3, beta=0.0)
    want = world.gradient(world.expected(normalised(world, 3)))
    torch.testing.assert_close(got, want, **CLOSE)
    plain = world.gradient(objective("rloo", world, 3, 0.0))
    assert torch.nn.functional.cosine_similarity(got, plain, dim=0) < 0.99


@pytest.mark.parametrize("size", [2, 3, 4])
def test_maxrl_climbs_the_first_terms_of_log_p(size: int) -> None:
    """Two of four responses are right, p in all: Σ_{k<G-1} (1 − p)^k·∇p."""
    world = bandit((0.0, 1.0, 1.0, 0.0))
    p = world.expected(world.scores.double())
    terms = sum((1 - p.item()) ** k for k in range(size - 1))
    torch.testing.assert_close(climbed("maxrl", world, size), terms * world.gradient(p), **CLOSE)


def test_maxrl_over_the_groups_of_a_transformer() -> None:
    """G = 2 with any scores from 0 up: (r − r′)/(r + r′) is what a response is worth beside another."""
    world = transformer(2)
    got = climbed("maxrl", world, 2)
    sums = world.scores[:, None] + world.scores
    worth = torch.where(sums > 0, (world.scores[:, None] - world.scores) / sums, 0.0).double()
    want = world.gradient(world.expected(worth @ world.probs().detach()))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(("baseline", "share"), [("none", 1.0), ("leave-one-out", 1.0), ("prompt", 0.5)])
def test_reinforce_baselines(baseline: str, share: float) -> None:
    """Against the mean of its group, itself included, half the gradient is left of groups of two."""
    world = transformer(2)
    got = climbed("reinforce", world, 2, beta=BETA, baseline=baseline)
    torch.testing.assert_close(got, share * world.gradient(objective("reinforce", world, 2, BETA)), **CLOSE)


@pytest.mark.parametrize("name", ["rloo", "grpo", "gspo", "ppo"])
def test_where_lengths_are_equal_the_reductions_differ_by_the_length_alone(name: str) -> None:
    """gspo's ratio has 1/T of each token's gradient, so that its sum over tokens is T times its mean."""
    world, size = transformer(2), 1 if name == "ppo" else 2
    plain = {"beta": 0.0} | ({"beta": BETA} if name == "ppo" else {})
    mean = climbed(name, world, size, reduction="token-mean", **plain)
    assert mean.norm() > 0.01
    for reduction, factor in (("sequence-token-mean", 1), ("constant", 1), ("sequence-mean", 2)):
        torch.testing.assert_close(
            climbed(name, world, size, reduction=reduction, **plain), factor * mean, **CLOSE
        )


KL_OF: dict[str, Callable[[World], Tensor]] = {
    "k2": World.state_kl, "exact": World.state_kl, "k3": lambda world: world.state_kl(forward=True),
}  # fmt: skip


@pytest.mark.parametrize("estimator", KL_OF)
@pytest.mark.parametrize("name", ["rloo", "dr-grpo", "grpo", "dapo", "gspo", "cispo", "sapo", "maxrl", "ppo"])
def test_report_39_kl_in_the_loss_is_that_of_the_states_visited(name: str, estimator: str) -> None:
    """All scores alike, so that the KL is all there is: k2 and exact have the gradient of
    KL(policy‖reference) at each state, k3 that of KL(reference‖policy), and no advantage mixes in.
    """
    world = transformer(2)
    world.scores = torch.ones(len(world.scores))
    config = {"beta": BETA, "kl_in": "loss", "kl_estimator": estimator, "reduction": "sequence-mean"}
    if name == "ppo":
        world.scores = torch.zeros(len(world.scores))
    got = climbed(name, world, 1 if name == "ppo" else 2, **config)
    torch.testing.assert_close(got, -BETA * world.gradient(KL_OF[estimator](world)), **CLOSE)
    whole = world.gradient(world.kl)
    assert (got + BETA * whole).norm() > 0.05 * BETA * whole.norm(), "states count, and are held fixed here"


@pytest.mark.parametrize("name", ["reinforce", "rloo", "dr-grpo", "ppo"])
def test_report_39_k1_in_the_reward_is_the_kl_of_whole_responses(name: str) -> None:
    """All scores 0: nothing but −β·∇KL(policy‖reference) is left, the states' own probabilities included."""
    world = transformer(2)
    world.scores = torch.zeros(len(world.scores))
    size = 1 if name in ("reinforce", "ppo") else 2
    changes = {"baseline": "none"} if name == "reinforce" else {**REWARD_KL, "reduction": "sequence-mean"}
    got = climbed(name, world, size, **{**changes, "beta": BETA})
    share = 0.5 if name == "dr-grpo" else 1.0
    torch.testing.assert_close(got, -share * BETA * world.gradient(world.kl), **CLOSE)


@pytest.mark.parametrize("estimator", KL_OF)
def test_report_39_kl_in_the_loss_keeps_its_meaning_after_an_update(estimator: str) -> None:
    """The responses are the old policy's, the next token's KL is the new one's: tokens are weighed by the
    ratio.
    """
    world = transformer(2)
    world.scores = torch.zeros(len(world.scores))
    kl = {"beta": BETA, "kl_in": "loss", "kl_estimator": estimator}
    config = make_config("ppo", world, 1, reduction="sequence-mean", rollout_epochs=2, **kl)
    models, step = collect_all("ppo", world, 1, config)
    old = world.probs().detach()
    (batch,) = step.updates[1].micro_batches
    with torch.no_grad():
        for parameter in world.parameters:
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    loss = group_probs(batch, 1) @ METHODS["ppo"].loss(models, batch, config).per_item
    log_p, log_q = (world.logits(m).log_softmax(-1) for m in (world.policy, world.reference))
    p, q = (log_q, log_p) if estimator == "k3" else (log_p, log_q)
    want = old @ (p.exp() * (p - q)).sum((1, 2))
    assert (world.probs().detach() - old).abs().sum() > 0.05
    torch.testing.assert_close(world.gradient(loss), BETA * world.gradient(want), **CLOSE)
