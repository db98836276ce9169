"""What the policy expects to earn: V(s_t), one number before each token, and a policy's outputs beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kleash.data.batches import Batch
from kleash.functional.chunked import linear_kl, linear_logprobs
from kleash.models.attention import use_grouped_attention
from kleash.models.forward import causal_model, response_states, vocabulary_head


class ValueModel(nn.Module):
    """V(s_t) = w·h(s_t) + b: the expected return before each token (PPO's critic).

    The head reads the policy's own last hidden state, or, with a `backbone`, that of a transformer of its
    own. It starts at zero, so the first advantages are the returns themselves.
    """

    def __init__(self, head: nn.Linear, backbone: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.head, self.backbone = head, backbone
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)

    @classmethod
    def on_trunk(cls, policy: nn.Module) -> ValueModel:
        """A head on the policy's states: two networks' work for the price of one, and a shared gradient."""
        return cls(_head(causal_model(policy)))

    @classmethod
    def separate(cls, policy: nn.Module) -> ValueModel:
        """A copy of the policy's transformer with a head of its own: as much memory again, no shared
        gradient.
        """
        backbone = copy.deepcopy(causal_model(policy).base_model).requires_grad_(True)
        return cls(_head(causal_model(policy)), use_grouped_attention(backbone))

    def of_states(self, states: Tensor) -> Tensor:
        """(M, H) -> (M,), in float32: one dot product a position."""
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.head(states.float())[:, 0]
        return values


def _head(model: PreTrainedModel) -> nn.Linear:
    return nn.Linear(model.config.get_text_config().hidden_size, 1).to(model.device)


@dataclass
class TokenOutputs:
    """What a policy says about every trained token of a batch, each (N, L) left-aligned, 0 where masked.

    logp carries a gradient, and so do values and kl (exact KL(policy‖reference) at the position) where asked
    for; entropy carries none.
    """

    logp: Tensor
    entropy: Tensor
    mask: Tensor
    values: Tensor | None = None
    kl: Tensor | None = None


def token_outputs(
    policy: nn.Module,
    batch: Batch,
    *,
    value: ValueModel | None = None,
    reference: nn.Module | None = None,
    temperature: float = 1.0,
    forbidden: Sequence[int] = (),
) -> TokenOutputs:
    """Log-probs and entropies under one pass of the policy; values with a `value` model, exact KL with a
    `reference`.
    """
    states, layout = response_states(policy, batch)
    head = vocabulary_head(policy)
    logp, entropy = linear_logprobs(
        states, head.weight, layout.targets, temperature=temperature, forbidden=forbidden, **head.options()
    )
    out = TokenOutputs(layout.dense(logp), layout.dense(entropy), layout.mask())
    if value is not None:
        read = states if value.backbone is None else response_states(value.backbone, batch)[0]
        out.values = layout.dense(value.of_states(read))
    if reference is not None:
        with torch.no_grad():
            states_ref, _ = response_states(reference, batch)
        head_ref = vocabulary_head(reference)
        kl, *_ = linear_kl(
            states,
            head.weight,
            states_ref,
            head_ref.weight,
            layout.targets,
            temperature=temperature,
            forbidden=forbidden,
            **head.options("_p"),
            **head_ref.options("_q"),
        )
        out.kl = layout.dense(kl)
    return out
