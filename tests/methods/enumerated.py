"""Policies whose responses can all be listed, so that what a method does in expectation is a sum.

Only the sampler is replaced: it returns every group of responses once, each with the log-probs that the
policy gives it. A method's own `collect` and `loss` then run on all groups at once, and each group's loss is
weighted by its probability. Everything is float64 except scores and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from kleash.config import build
from kleash.data.items import PromptIds
from kleash.methods import METHODS
from kleash.methods.base import Context, LossOutput, Models, Step
from kleash.methods.policy_batch import PolicyBatch
from kleash.sampling import Rollouts

WORDS = 4  # tokens of a response; the next id is the end token, which fixed_length removes
END = WORDS
PROMPT = PromptIds([0], "0", number=1)


def tiny_gpt2(seed: int, layers: int, hidden: int) -> GPT2LMHeadModel:
    """A random GPT-2 in float64; without layers its next-token distribution is a softmax of free logits."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=WORDS + 1, n_positions=8, n_embd=hidden, n_layer=layers, n_head=2, bos_token_id=None,
        eos_token_id=END, tie_word_embeddings=False, initializer_range=0.7, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double().eval()


@dataclass
class World:
    """A policy, its reference, all responses (K, T) and their scores (K,)."""

    policy: GPT2LMHeadModel
    reference: GPT2LMHeadModel
    responses: Tensor
    scores: Tensor

    def logits(self, model: GPT2LMHeadModel) -> Tensor:
        """(K, T, 4) through the model's own forward pass, the end token removed."""
        rows = torch.cat([torch.tensor(PROMPT.prompt_ids).expand(len(self.responses), 1), self.responses], 1)
        return model(rows).logits[:, :-1, :WORDS]

    def token_logps(self, model: GPT2LMHeadModel) -> Tensor:
        """(K, T) log π of every token of every response."""
        return self.logits(model).log_softmax(-1).gather(-1, self.responses[..., None])[..., 0]

    def probs(self, model: GPT2LMHeadModel | None = None) -> Tensor:
        """(K,) probability of every response, the policy's unless another model is given."""
        return self.token_logps(self.policy if model is None else model).sum(1).exp()

    @property
    def ref_probs(self) -> Tensor:
        return self.probs(self.reference).detach()

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p in self.policy.parameters() if p.requires_grad]

    def expected(self, values: Tensor) -> Tensor:
        """Σ_y π(y)·values(y)."""
        return self.probs() @ values

    @property
    def kl(self) -> Tensor:
        """KL(policy‖reference) of whole responses."""
        probs = self.probs()
        return (probs * (probs.log() - self.ref_probs.log())).sum()

    def state_kl(self, forward: bool = False) -> Tensor:
        """Σ_t KL(policy‖reference) of the next token, averaged over the policy's responses, which the
        derivative holds fixed; `forward`: KL(reference‖policy).
        """
        log_p, log_q = self.logits(self.policy).log_softmax(-1), self.logits(self.reference).log_softmax(-1)
        log_q = log_q.detach()
        terms = log_q.exp() * (log_q - log_p) if forward else log_p.exp() * (log_p - log_q)
        return self.probs().detach() @ terms.sum((1, 2))

    def gradient(self, objective: Tensor) -> Tensor:
        """All parameters' derivatives, as one vector."""
        parts = torch.autograd.grad(objective, self.parameters, allow_unused=True)
        zeros = (torch.zeros_like(p) for p in self.parameters)
        return torch.cat([(z if g is None else g).flatten() for g, z in zip(parts, zeros, strict=True)])

    def reward(self, responses: list[str], response_ids: list[list[int]]) -> list[float]:
        """The listed score of each response."""
        table = {
            tuple(ids): score
            for ids, score in zip(self.responses.tolist(), self.scores.tolist(), strict=True)
        }
        return [table[tuple(ids)] for ids in response_ids]

    def models(self) -> Models:
        """The models of a run on this world."""
        return Models(self.policy, _Tokenizer(), reference=self.reference, reward=self.reward)


class _Tokenizer:
    """As much of a tokenizer as collecting needs."""

    eos_token_id = END
    pad_token_id = END

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def bandit(scores: tuple[float, ...] = (0.0, 1.0, 0.25, 0.5)) -> World:
    """One token, four responses, a softmax over free logits (only the projection is trained)."""
    policy, reference = tiny_gpt2(0, 0, 4), tiny_gpt2(1, 0, 4)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    return World(policy, reference.requires_grad_(False), torch.arange(WORDS)[:, None], torch.tensor(scores))


def transformer(steps: int = 3) -> World:
    """Two layers of attention and `steps` tokens: 4^steps responses with scores 0, ½, … , 2½."""
    responses = torch.tensor(list(itertools.product(range(WORDS), repeat=steps)))
    scores = torch.randint(0, 6, (len(responses),), generator=torch.Generator().manual_seed(5)) / 2
    return World(tiny_gpt2(2, 2, 8), tiny_gpt2(3, 2, 8).requires_grad_(False), responses, scores)


def every_group(world: World, size: int, side_by_side: bool = True) -> Rollouts:
    """All K^size groups of responses as rollouts; `side_by_side`: the members of a group share their prompt
    in the forward pass (slower where there are thousands).
    """
    draws = torch.cartesian_prod(*[torch.arange(len(world.responses))] * size).reshape(-1)
    with torch.no_grad():
        logp = world.token_logps(world.policy)[draws]
    count = len(draws)
    responses = world.responses[draws]
    mask = torch.ones_like(responses, dtype=torch.bool)
    group = torch.arange(count // size).repeat_interleave(size) if side_by_side else torch.arange(count)
    return Rollouts(
        torch.tensor(PROMPT.prompt_ids).expand(count, 1), mask[:, :1], responses, mask, logp,
        torch.zeros(count, dtype=torch.bool), group, [PROMPT.text] * count, [""] * count,
        forbidden=(END,),
    )  # fmt: skip


@contextmanager
def sampling(rollouts: Rollouts) -> Iterator[None]:
    """Within, whatever is sampled is `rollouts`."""
    with mock.patch("kleash.methods.online.sample", lambda *args, **options: rollouts):
        yield


def make_config(name: str, world: World, size: int, **changes: Any) -> Any:
    """A method's options for responses of the world in groups of `size`."""
    options = {
        "data": [], "reward": world.reward, "samples_per_prompt": size, "batch_size": size,
        "max_new_tokens": world.responses.shape[1], "fixed_length": True, "max_length": 8,
    }  # fmt: skip
    if name == "ppo":
        options |= {"rollout_epochs": 1, "minibatches": 1, "whiten": False, "lam": 1.0}
    return build(METHODS[name].config, {**options, **changes})


def collect_all(
    name: str, world: World, size: int, config: Any, side_by_side: bool = True
) -> tuple[Models, Step]:
    """A method's step over every group of responses."""
    method, models = METHODS[name], world.models()
    if method.prepare is not None:
        method.prepare(models, config)
    rollouts = every_group(world, size, side_by_side)
    prompts = [PROMPT] * (int(rollouts.group.max()) + 1)
    context = Context(step=2, generator=torch.Generator().manual_seed(0))
    assert method.collect is not None
    with sampling(rollouts):
        return models, method.collect(models, prompts, config, context)


def expected_loss(name: str, world: World, size: int, config: Any, side_by_side: bool = True) -> Tensor:
    """E[loss of a step of one group], a scalar with gradient: every group's loss weighted by its probability.

    Where groups without spread are left out, the expectation is over the others.
    """
    models, step = collect_all(name, world, size, config, side_by_side)
    loss, mass = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in step.updates[0].micro_batches:
        weight = group_probs(batch, size)
        loss = loss + weight @ items(METHODS[name].loss(models, batch, config), size)
        mass = mass + weight.sum()
    tokens = world.responses.shape[1] if getattr(config, "reduction", "") == "token-mean" else 1
    return loss / (size * tokens) / (1 if getattr(config, "no_spread", "keep") == "keep" else mass)


def items(output: LossOutput, size: int) -> Tensor:
    """(G,) the summed item losses of each group."""
    return output.per_item.view(-1, size).sum(1)


def group_probs(batch: PolicyBatch, size: int) -> Tensor:
    """(G,) probability of each group of a batch under the policy that sampled it."""
    return batch.logp.sum(1).view(-1, size).sum(1).exp()
