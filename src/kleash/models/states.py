"""Hidden states of a batch's tokens: without padding where the architecture allows it, else with.

Either way the answer is the states of all tokens that were run and, for each token of a row, where among them
its own is. Rows of a group share the states of their prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from kleash.data.batches import Batch
from kleash.models.attention import NAME, additive_mask
from kleash.models.packing import pack

# Kinds of model that learn from the mask and the position ids alone who sees whom and from how far. The tests
# hold each against its own plain forward pass; a kind that is not here runs padded.
PACKABLE = {
    "cohere", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral",
    "mixtral", "olmo", "olmo2", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
}  # fmt: skip


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside an adapter wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def packable(model: PreTrainedModel, longest: int) -> bool:
    """Whether rows of at most `longest` tokens may stand side by side in a line of this model.

    Not where attention takes no additive mask (flash), where distance is counted in places and not positions
    (ALiBi), where a layer carries a state along (recurrent), nor where a sliding window cuts such rows. A
    window that holds a whole row hides nothing, and its layers take the same mask as the others.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    return (
        model.config.model_type in PACKABLE
        and config._attn_implementation in ("eager", "sdpa", NAME)
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
        and not getattr(config, "alibi", False)
        and (window is None or longest <= window)
    )


def token_states(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Last hidden states (M, H) of a batch's tokens and the place (N, T) of each row's tokens among them.

    Places of padding mean nothing. A batch with nothing to skip runs as it is, open to attention kernels that
    know only the causal mask. `states_at` reads states at places.
    """
    inner, mask = causal_model(model), batch.attention_mask
    if batch.shared_prefix is None and bool(mask.all()):
        return _padded(inner, batch)
    if packable(inner, int(mask.sum(1).max())):
        return _packed(inner, batch)
    return _padded(inner, batch) if batch.shared_prefix is None else _prefixes_first(inner, batch)


def states_at(states: Tensor, place: Tensor) -> Tensor:
    """The states (K, H) at places (K,).

    Where rows share a state, its gradients add up in a fixed order, as an embedding's do and those of
    `states[place]` do not on several threads: a resumed run is bit-identical.
    """
    return F.embedding(place, states)


def run_backbone(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any = None
) -> Tensor:
    """Last hidden states (N, T, H); `mask` is (N, keys) over padding, or ready and additive, (N, 1, T, T)."""
    return model.base_model(
        input_ids=tokens,
        attention_mask=mask.long() if mask.ndim == 2 else mask,
        position_ids=positions,
        cache=cache,
        use_cache=cache is not None,
    ).last_hidden_state


def positions_of(mask: Tensor) -> Tensor:
    """Position of each token in its row, wherever the padding is (N, T)."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def _packed(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows side by side, in one run."""
    packed = pack(batch)
    mask = additive_mask(packed.allowed[:, None], model.dtype)
    states = run_backbone(model, packed.tokens, mask, packed.positions)
    return states.flatten(0, 1), packed.place


def _padded(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """The rows as they are."""
    states = run_backbone(model, batch.tokens, batch.attention_mask, positions_of(batch.attention_mask))
    place = torch.arange(batch.tokens.numel(), device=states.device)
    return states.flatten(0, 1), place.view(batch.tokens.shape)


def _prefixes_first(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Each group's prefix, then the rest of every (right-padded) row against the prefix's keys and values."""
    size, lengths = batch.group_size, batch.shared_prefix
    assert lengths is not None
    start, width = lengths.repeat_interleave(size)[:, None], batch.tokens.shape[1]
    prefix, prefix_mask = _prefixes(batch, lengths)
    tail = start + torch.arange(int((batch.attention_mask.sum(-1) - start[:, 0]).max()), device=start.device)
    index = tail.clamp_max(width - 1)
    rest = batch.tokens.gather(1, index)
    rest_mask = batch.attention_mask.gather(1, index) & (tail < width)
    cache = DynamicCache()
    prefix_states = run_backbone(model, prefix, prefix_mask, positions_of(prefix_mask), cache)
    cache.batch_repeat_interleave(size)
    mask = torch.cat([prefix_mask.repeat_interleave(size, 0), rest_mask], dim=1)
    tail_states = run_backbone(model, rest, mask, tail, cache)
    column = torch.arange(width, device=start.device)
    row = torch.arange(len(start), device=start.device)[:, None]
    in_prefix = (row // size + 1) * prefix.shape[1] - start + column  # prefixes are right-aligned
    in_tail = prefix.numel() + row * tail.shape[1] + column - start
    place = torch.where(column < start, in_prefix, in_tail).masked_fill(~batch.attention_mask, 0)
    return torch.cat([prefix_states.flatten(0, 1), tail_states.flatten(0, 1)]), place


def _prefixes(batch: Batch, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Each group's shared prefix, right-aligned: ids and mask (G, P)."""
    first = batch.tokens[:: batch.group_size]
    width = int(lengths.max())
    column = torch.arange(width, device=lengths.device) - (width - lengths)[:, None]
    mask = column >= 0
    return first.gather(1, column.clamp_min(0)), mask
