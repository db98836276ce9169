"""From the hidden states of a batch to what training and measurement need.

The next-token shift lives here and nowhere else: the state at position t predicts token t+1. Only positions
whose next token is a trained one reach the vocabulary projection, and that projection works in chunks, so
`(N, T, V)` logits never exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kleash.data.batches import Batch
from kleash.errors import UsageError
from kleash.functional.chunked import linear_kl, linear_logprobs
from kleash.models.states import causal_model, states_at, token_states

Dtype = Literal["auto", "float32", "bfloat16"]


def compute_dtype(dtype: Dtype = "auto") -> torch.dtype:
    """The dtype of matrix products: `auto` is bfloat16 where the machine multiplies it fast, else float32."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def autocast(dtype: Dtype = "auto", device: str = "cpu") -> AbstractContextManager[None]:
    """Context in which matrix products run in `compute_dtype(dtype)` over float32 weights."""
    kind = compute_dtype(dtype)
    return torch.autocast(device, dtype=torch.bfloat16, enabled=kind is torch.bfloat16)


@dataclass(frozen=True)
class Head:
    """The vocabulary projection of a model: logits = softcap(scale · (states @ weight.T + bias))."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    def options(self, side: str = "") -> dict[str, Any]:
        """The head as keyword arguments of the chunked kernels; `side` is "_p" or "_q" where two heads
        meet.
        """
        return {f"bias{side}": self.bias, f"scale{side}": self.scale, f"softcap{side}": self.softcap}


@dataclass
class PositionStats:
    """Per-token numbers of a batch under two models, each (N, L), left-aligned over the trained tokens.

    kl: exact KL(policy‖reference) of the next-token distributions, nats. logp, logp_ref: of the token that
    stands there. entropy: of the policy, nats. mask: which entries are real; the others are 0.
    """

    kl: Tensor
    logp: Tensor
    logp_ref: Tensor
    entropy: Tensor
    mask: Tensor


def vocabulary_head(model: nn.Module) -> Head:
    """The projection from states to logits, with the architecture's scaling and soft cap."""
    inner = causal_model(model)
    layer = inner.get_output_embeddings()
    config = inner.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, getattr(layer, "bias", None), scale, softcap)


def verify_forward(model: nn.Module, tolerance: float = 1e-4) -> float:
    """Largest gap between our log-probs and the model's own forward pass on a few tokens; UsageError past
    tolerance.

    Two rows that share a prompt go the way that training takes, then each alone through the model. An
    architecture with a head we do not know (another scaling, another cap), or in which rows side by side
    disturb each other, is refused here rather than trained wrong.
    """
    inner = causal_model(model)
    batch = _two_answers(inner.config.get_text_config().vocab_size).to(inner.device)
    was_training = inner.training
    inner.eval()
    with torch.no_grad():
        ours, trained = batch_logprobs(model, batch)
        rows = zip(batch.tokens, batch.attention_mask, batch.response_mask, strict=True)
        theirs = torch.cat([_own_logprobs(model, ids[real], aim[real]) for ids, real, aim in rows])
    inner.train(was_training)
    gap = float((ours[trained] - theirs).abs().max())
    if not gap <= tolerance:
        raise UsageError(
            f"model: the log-probabilities of {type(inner).__name__} computed from its hidden states "
            f"differ from its own by {gap:.2g} nats (at most {tolerance:g} is accepted): its head or its "
            "attention does something this library does not know. Please report the architecture."
        )
    return gap


def _two_answers(vocabulary: int) -> Batch:
    """A prompt of three tokens with answers of two and of four."""
    tokens = torch.tensor([[1, 2, 3, 4, 5, 0, 0], [1, 2, 3, 6, 7, 8, 9]]) % vocabulary
    column = torch.arange(7)
    mask = column < torch.tensor([[5], [7]])
    return Batch(tokens, mask, mask & (column >= 3), 2, torch.tensor([3]))


def _own_logprobs(model: nn.Module, ids: Tensor, trained: Tensor) -> Tensor:
    """Log-probs of the trained tokens of one row (T,), through the model's own head."""
    logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0]
    logp = logits[:-1].float().log_softmax(-1)
    return logp.gather(-1, ids[1:, None])[trained[1:], 0]


@dataclass
class _Layout:
    """Where the trained tokens of a batch stand, and where among its row's trained tokens each belongs."""

    rows: Tensor  # (M,) row of each trained token
    column: Tensor  # (M,) its place among the row's trained tokens
    at: Tensor  # (M,) position in the row of the token itself
    targets: Tensor  # (M,) its id
    shape: tuple[int, int]  # (N, L)

    def dense(self, flat: Tensor) -> Tensor:
        out = flat.new_zeros(self.shape)
        return out.index_put((self.rows, self.column), flat)

    def mask(self) -> Tensor:
        out = torch.zeros(self.shape, dtype=torch.bool, device=self.rows.device)
        out[self.rows, self.column] = True
        return out


def _layout(batch: Batch) -> _Layout:
    rows, at = batch.response_mask.nonzero(as_tuple=True)
    if not bool((batch.attention_mask[rows, at - 1] & (at > 0)).all()):
        raise ValueError("the first token of a row cannot be trained: nothing precedes it")
    column = (batch.response_mask.long().cumsum(-1) - 1)[rows, at]
    length = int(batch.response_mask.sum(-1).max()) if len(rows) else 0
    return _Layout(rows, column, at, batch.tokens[rows, at], (len(batch.tokens), length))


def response_states(model: nn.Module, batch: Batch) -> tuple[Tensor, _Layout]:
    """Hidden states (M, H) that predict the M trained tokens of a batch, and where those tokens belong."""
    layout = _layout(batch)
    states, place = token_states(model, batch)
    return states_at(states, place[layout.rows, layout.at - 1]), layout


def batch_logprobs(
    model: nn.Module, batch: Batch, *, temperature: float = 1.0, forbidden: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """log π(y_t | s_t) of every trained token (seed Eq. 3): (N, L) left-aligned over each row's trained
    tokens, and its mask.

    Gradients flow where enabled. `temperature` divides the logits and `forbidden` ids are removed before
    the softmax, as they were when the tokens were sampled. Entries past a row's last trained token are 0
    and masked.
    """
    states, layout = response_states(model, batch)
    head = vocabulary_head(model)
    logp, _ = linear_logprobs(
        states, head.weight, layout.targets, temperature=temperature, forbidden=forbidden, **head.options()
    )
    return layout.dense(logp), layout.mask()


@torch.no_grad()
def batch_kl(
    policy: nn.Module,
    reference: nn.Module,
    batch: Batch,
    *,
    temperature: float = 1.0,
    forbidden: Sequence[int] = (),
) -> PositionStats:
    """Exact KL(policy‖reference) over the vocabulary at every trained position (the terms of seed Eq. 4).

    Both distributions are taken at the same temperature and with the same ids removed. When the batch's
    tokens were sampled from the policy, the row sums average to the sequence KL.
    """
    states, layout = response_states(policy, batch)
    states_ref, _ = response_states(reference, batch)
    head, head_ref = vocabulary_head(policy), vocabulary_head(reference)
    kl, logp, logp_ref, entropy = linear_kl(
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
    kl, logp, logp_ref, entropy = (layout.dense(flat) for flat in (kl, logp, logp_ref, entropy))
    return PositionStats(kl, logp, logp_ref, entropy, layout.mask())


def last_token_states(model: nn.Module, batch: Batch) -> Tensor:
    """Hidden state (N, H) at each row's last real token, wherever the padding is."""
    states, place = token_states(model, batch)
    column = torch.arange(batch.tokens.shape[1], device=place.device)
    last = (batch.attention_mask * column).argmax(-1, keepdim=True)
    return states_at(states, place.gather(1, last)[:, 0])


def response_logprobs(
    model: nn.Module,
    prompt_ids: Tensor,
    response_ids: Tensor,
    prompt_mask: Tensor | None = None,
    response_mask: Tensor | None = None,
) -> Tensor:
    """log π(y_t | x, y_<t) at every response position, prompts excluded (seed 004, exercise 1; Eq. 3).

    prompt_ids (N, P), padded on either side as `prompt_mask` says; response_ids (N, L) padded on the right.
    Returns (N, L), zero where `response_mask` is False. The sum over a row is log π(y|x). A row without a
    prompt token raises ValueError: nothing would predict its first response token.
    """
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool) if prompt_mask is None else prompt_mask.bool()
    response_mask = (
        torch.ones_like(response_ids, dtype=torch.bool) if response_mask is None else response_mask.bool()
    )
    if prompt_ids.shape[0] != response_ids.shape[0]:
        raise ValueError(f"{prompt_ids.shape[0]} prompts but {response_ids.shape[0]} responses")
    if not bool(prompt_mask.any(-1).all()):
        raise ValueError(
            "every row needs at least one prompt token: nothing else predicts its first response token"
        )
    if bool((response_mask[:, 1:] & ~response_mask[:, :-1]).any()):
        raise ValueError("response_mask must be True on a left-aligned run of tokens in every row")
    tokens = torch.cat([prompt_ids, response_ids], 1)
    mask = torch.cat([prompt_mask, response_mask], 1)
    trained = torch.cat([torch.zeros_like(prompt_mask), response_mask], 1)
    order = torch.argsort((~mask).long(), dim=1, stable=True)  # real tokens first, in order: right padding
    batch = Batch(tokens.gather(1, order), mask.gather(1, order), trained.gather(1, order))
    logp, _ = batch_logprobs(model, batch)
    return torch.nn.functional.pad(logp, (0, response_ids.shape[1] - logp.shape[1]))
