"""Prompts to rollouts: sampled responses with the log-probabilities they were sampled with.

A prompt sampled several times is prefilled once and its keys and values are copied to its group. The cache is
allocated once, rows that have ended leave the batch, and each token's log-probability is kept as it is
drawn, under the same temperature and support that training will use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicLayer, PreTrainedModel, PreTrainedTokenizerBase

from kleash.data.batches import Batch
from kleash.errors import UsageError
from kleash.models.attention import NAME
from kleash.models.forward import Head, vocabulary_head
from kleash.models.states import causal_model, positions_of, run_backbone

Progress = Callable[[int, int, str], None]


@dataclass
class Rollouts:
    """Sampled responses, one row each; what is trained on is bit for bit what was sampled.

    prompt_ids (N, P) left-padded with prompt_mask; response_ids (N, L) right-padded with response_mask (an
    end token that was sampled is part of the response); logp (N, L) as sampled: at `temperature`, with the
    `forbidden` ids removed before the softmax; ended (N,) whether the response stopped by itself; group
    (N,) number of the prompt. prompts and responses are the texts; `columns` are the prompts' other
    columns, one entry a row.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    logp: Tensor
    ended: Tensor
    group: Tensor
    prompts: list[str]
    responses: list[str]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    temperature: float = 1.0
    forbidden: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def take(self, indices: Sequence[int] | Tensor) -> Rollouts:
        """The rows at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.long)
        picks = index.tolist()
        tensors = ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "logp", "ended", "group")
        return Rollouts(
            **{name: getattr(self, name)[index] for name in tensors},
            prompts=[self.prompts[i] for i in picks],
            responses=[self.responses[i] for i in picks],
            columns={key: [values[i] for i in picks] for key, values in self.columns.items()},
            temperature=self.temperature,
            forbidden=self.forbidden,
        )

    def to_batch(self) -> Batch:
        """Right-padded rows whose trained tokens are the responses; equal-sized groups in order share their
        prompt.
        """
        tokens = torch.cat([self.prompt_ids, self.response_ids], 1)
        mask = torch.cat([self.prompt_mask, self.response_mask], 1)
        trained = torch.cat([torch.zeros_like(self.prompt_mask), self.response_mask], 1)
        order = torch.argsort((~mask).long(), dim=1, stable=True)  # real tokens first: right padding
        width = int(mask.sum(-1).max())
        tokens, mask, trained = (x.gather(1, order)[:, :width] for x in (tokens, mask, trained))
        size = _common_group_size(self.group)
        shared = self.prompt_mask.sum(-1)[::size] if size > 1 else None
        return Batch(
            tokens, mask, trained, group_size=size, shared_prefix=shared, index=torch.arange(len(self))
        )


def join(several: Sequence[Rollouts]) -> Rollouts:
    """Rollouts under one policy one after another; groups are numbered on."""
    if len(several) == 1:
        return several[0]
    prompt, response = (
        max(getattr(r, name).shape[1] for r in several) for name in ("prompt_ids", "response_ids")
    )
    pads = {
        "prompt_ids": prompt, "prompt_mask": prompt,
        "response_ids": response, "response_mask": response, "logp": response,
    }  # fmt: skip
    tensors = {
        name: torch.cat([_widened(getattr(r, name), width, name.startswith("prompt")) for r in several])
        for name, width in pads.items()
    }
    offsets = [0, *torch.tensor([int(r.group.max()) + 1 for r in several]).cumsum(0).tolist()]
    return Rollouts(
        **tensors,
        ended=torch.cat([r.ended for r in several]),
        group=torch.cat([r.group + offset for r, offset in zip(several, offsets, strict=False)]),
        prompts=[text for r in several for text in r.prompts],
        responses=[text for r in several for text in r.responses],
        columns={key: [v for r in several for v in r.columns[key]] for key in several[0].columns},
        temperature=several[0].temperature,
        forbidden=several[0].forbidden,
    )


def _widened(rows: Tensor, width: int, left: bool) -> Tensor:
    pad = width - rows.shape[1]
    return torch.nn.functional.pad(rows, (pad, 0) if left else (0, pad))


def _common_group_size(group: Tensor) -> int:
    """k if the rows are consecutive groups of k rows of one prompt each, else 1."""
    _, counts = torch.unique_consecutive(group, return_counts=True)
    size = int(counts[0]) if len(counts) else 1
    return size if bool((counts == size).all()) else 1


class RoomyLayer(DynamicLayer):
    """One layer's keys and values in buffers with room for tokens to come, so that a step copies nothing.

    Attention gets the whole buffers where it can mask what is not written yet (`whole`): matrix products on a
    CPU copy a slice of a buffer before they use it, all of it, at every token. Elsewhere it gets the slice.
    """

    room, whole = 0, False  # set by KeyValueCache

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.length = 0
            self.key_buffer, self.value_buffer = _empty(key_states), _empty(value_states)
        end = self.length + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            wanted = self._capacity(end)
            self.key_buffer = _widened_to(self.key_buffer, self.length, wanted)
            self.value_buffer = _widened_to(self.value_buffer, self.length, wanted)
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        first = self.length == 0
        self.length = end
        self._show()
        # The first mask is made before there is a layer to ask for its size: it has the prompt's.
        return (self.keys[:, :, :end], self.values[:, :, :end]) if first else (self.keys, self.values)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, repeated or dropped as `rows` says."""
        self.key_buffer, self.value_buffer = self.key_buffer[rows], self.value_buffer[rows]
        self._show()

    def receive(self, rows: list[int], part: RoomyLayer, count: int, width: int) -> None:
        """Take over what `part` holds as the given ones of `count` rows, right-aligned in `width` tokens."""
        if not self.is_initialized:
            self.lazy_initialization(part.keys, part.values)
            shape = (count, part.keys.shape[1], self._capacity(width), part.keys.shape[3])
            self.key_buffer, self.value_buffer = part.keys.new_zeros(shape), part.values.new_zeros(shape)
            self.length = width
        self.key_buffer[rows, :, width - part.length : width] = part.key_buffer[:, :, : part.length]
        self.value_buffer[rows, :, width - part.length : width] = part.value_buffer[:, :, : part.length]
        self._show()

    def get_seq_length(self) -> int:
        """Tokens written so far."""
        return self.length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that attention will get at the next update, and where they begin."""
        end = self.get_seq_length() + query_length
        return (self._capacity(end) if self.whole else end), 0

    def _capacity(self, end: int) -> int:
        return min(self.room, -(-end // BLOCK) * BLOCK)

    def _show(self) -> None:
        stop = self.key_buffer.shape[-2] if self.whole else self.length
        self.keys, self.values = self.key_buffer[:, :, :stop], self.value_buffer[:, :, :stop]


BLOCK = 16  # tokens by which the buffers grow
PREFILL = 16  # prompts that are read at once: of like lengths, since the shorter ones are padded


def _empty(states: Tensor) -> Tensor:
    dtype = states.dtype
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
    return states.new_empty((*states.shape[:2], 0, states.shape[3]), dtype=dtype)


def _widened_to(buffer: Tensor, length: int, wanted: int) -> Tensor:
    """A buffer of `wanted` tokens with the first `length` of the old one; zeros after them, since attention's
    weight 0 on what is not written must not meet a nan.
    """
    wider = buffer.new_zeros((*buffer.shape[:2], wanted, buffer.shape[3]))
    wider[:, :, :length] = buffer[:, :, :length]
    return wider


class KeyValueCache(Cache):
    """A cache with at most `room` tokens a row, whose rows can be repeated (a prompt to its group) and
    dropped (ended rows). `whole`: see RoomyLayer.
    """

    def __init__(self, room: int, whole: bool) -> None:
        super().__init__(
            layer_class_to_replicate=type("Layer", (RoomyLayer,), {"room": room, "whole": whole})
        )

    def select(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.select(rows)

    def receive(self, rows: list[int], part: KeyValueCache, count: int, width: int) -> None:
        """See RoomyLayer.receive."""
        for number, layer in enumerate(part.layers):
            if number == len(self.layers):
                self.layers.append(self.layer_class_to_replicate())
            self.layers[number].receive(rows, layer, count, width)


@dataclass(frozen=True)
class Sampler:
    """What one token is drawn from: the softmax of logits / temperature without the forbidden ids, cut by
    top-k and top-p.
    """

    temperature: float
    top_p: float
    top_k: int
    forbidden: tuple[int, ...]

    def draw(self, states: Tensor, head: Head, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One token id and its log-probability for each state (N, H): (N,), (N,) float32."""
        logits = torch.nn.functional.linear(states, head.weight, head.bias).float()
        if head.scale != 1.0:
            logits = logits * head.scale
        if head.softcap is not None:
            logits = torch.tanh(logits / head.softcap) * head.softcap
        if self.forbidden:
            logits[:, list(self.forbidden)] = -torch.inf
        if self.temperature == 0.0:
            ids = logits.argmax(-1)
            return ids, logits.new_zeros(len(ids))  # greedy: the choice is certain
        if self.temperature != 1.0:
            logits = logits / self.temperature
        if self.top_k or self.top_p < 1.0:
            logits = _cut(logits, self.top_k, self.top_p)
        logp = logits - logits.logsumexp(-1, keepdim=True)
        uniform = torch.rand(len(logp), generator=generator).to(
            logp.device
        )  # drawn on the CPU: one stream anywhere
        ids = _inverse_cdf(logp.exp(), uniform)
        return ids, logp.gather(-1, ids[:, None])[:, 0]


def _cut(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Remove all but the top_k ids, then all but the smallest set whose probability reaches top_p."""
    ranked, order = logits.sort(-1, descending=True)
    before = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
    drop = before >= top_p
    if top_k:
        drop[:, top_k:] = True
    drop[:, 0] = False
    return logits.masked_fill(drop.gather(-1, order.argsort(-1)), -torch.inf)


def _inverse_cdf(probabilities: Tensor, uniform: Tensor, block: int = 256) -> Tensor:
    """The id at which the cumulative probability passes `uniform`, in two levels: blocks of the vocabulary,
    then within.

    probabilities (N, V) need not sum to exactly 1; uniform (N,) in [0, 1). An id of probability 0 is never
    returned.
    """
    rows, size = probabilities.shape
    padded = torch.nn.functional.pad(probabilities, (0, -size % block)).view(rows, -1, block)
    totals = padded.sum(-1).double()
    running = totals.cumsum(-1)
    target = uniform.double() * running[:, -1]
    which = torch.searchsorted(running, target[:, None], right=True)[:, 0].clamp_max(running.shape[1] - 1)
    row = torch.arange(rows, device=padded.device)
    inside = padded[row, which].double().cumsum(-1)
    rest = target - (running[row, which] - totals[row, which])
    place = torch.searchsorted(inside, rest[:, None], right=True)[:, 0]
    last = (
        (padded[row, which] > 0).long().mul(torch.arange(block, device=padded.device)).argmax(-1)
    )  # rounding may pass the last real id
    return which * block + torch.minimum(place, last)


@torch.no_grad()
def sample(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Sequence[int]],
    *,
    n: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    fixed_length: bool = False,
    generator: torch.Generator | None = None,
    seed: int = 0,
    batch_rows: int = 64,
    columns: dict[str, list[Any]] | None = None,
    progress: Progress | None = None,
) -> Rollouts:
    """Sample `n` responses of at most `max_new_tokens` tokens to each prompt, with their log-probs as
    sampled.

    Rows come out group by group: the n responses to prompt 0, then to prompt 1, and so on. A response ends
    with the model's end token, which is then its last token. `fixed_length` removes end tokens before the
    softmax, so every response has exactly `max_new_tokens` tokens (seed 004, the lab). `temperature=0`
    takes the likeliest token. `generator` draws; without one, a new one is seeded with `seed`. `batch_rows`
    bounds the rows decoded at once. An empty prompt or an option out of range raises UsageError.
    """
    _check(prompts, n, max_new_tokens, temperature, top_p, top_k)
    inner = causal_model(model)
    was_training = inner.training
    inner.eval()
    generator = generator or torch.Generator().manual_seed(seed)
    ends = end_ids(model, tokenizer)
    sampler = Sampler(temperature, top_p, top_k, ends if fixed_length else ())
    ids = [_prompt_ids(prompt, tokenizer, row) for row, prompt in enumerate(prompts)]
    per_batch = max(1, batch_rows // n)
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    with compute_weights(inner):
        for start in range(0, len(ids), per_batch):
            chunk = ids[start : start + per_batch]
            parts.append(
                _decode(model, chunk, n, max_new_tokens, sampler, () if fixed_length else ends, generator)
            )
            if progress is not None:
                progress(min(start + per_batch, len(ids)) * n, len(ids) * n, "sampled")
    inner.train(was_training)
    return _rollouts(prompts, ids, n, parts, tokenizer, columns or {}, sampler)


def end_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's end token and those of the model's generation config."""
    config = getattr(causal_model(model), "generation_config", None)
    listed = getattr(config, "eos_token_id", None)
    listed = listed if isinstance(listed, list | tuple) else [listed]
    return tuple(sorted({i for i in (*listed, tokenizer.eos_token_id) if i is not None}))


class compute_weights:
    """While inside, the matrices of a model are held in autocast's dtype, so that decoding does not cast
    them each step.

    The values are those that autocast would use. Outside, the float32 weights are back, untouched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        kind = next(self.model.parameters()).device.type
        if not torch.is_autocast_enabled(kind):
            return
        dtype = torch.get_autocast_dtype(kind)
        embeddings = {
            id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)
        }
        for module in self.model.modules():
            if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
                self.kept.append((module.weight, module.weight.data))
                module.weight.data = module.weight.data.to(dtype)

    def __exit__(self, *exception: object) -> None:
        for parameter, data in self.kept:
            parameter.data = data
        self.kept.clear()


def _decode(
    model: nn.Module,
    prompts: list[list[int]],
    n: int,
    max_new_tokens: int,
    sampler: Sampler,
    ends: tuple[int, ...],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Responses to one batch of prompts: ids, logp (rows, max_new_tokens), lengths, ended (rows,)."""
    inner, head = causal_model(model), vocabulary_head(model)
    if torch.is_autocast_enabled(head.weight.device.type):
        head = Head(
            head.weight.to(torch.get_autocast_dtype(head.weight.device.type)),
            head.bias,
            head.scale,
            head.softcap,
        )
    device = head.weight.device
    states, mask, cache = _prefill(inner, prompts, max_new_tokens, device)
    alive = torch.arange(len(prompts), device=device).repeat_interleave(
        n
    )  # prompt of each row, then the rows still going
    if n > 1:
        cache.select(alive)
    states, mask, position = states[alive], mask[alive], mask.sum(-1)[alive]
    rows = len(alive)
    ids = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
    logp = torch.zeros(rows, max_new_tokens, device=device)
    lengths = torch.full((rows,), max_new_tokens, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    alive, end_set = torch.arange(rows, device=device), torch.tensor(ends, dtype=torch.long, device=device)
    for step in range(max_new_tokens):
        drawn, drawn_logp = sampler.draw(states, head, generator)
        ids[alive, step], logp[alive, step] = drawn, drawn_logp
        going = ~torch.isin(drawn, end_set)
        ended[alive], lengths[alive[~going]] = ~going, step + 1
        if step + 1 == max_new_tokens or not bool(going.any()):
            break
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        if not bool(going.all()):
            keep = going.nonzero()[:, 0]
            cache.select(keep)
            drawn, mask, position, alive = drawn[keep], mask[keep], position[keep], alive[keep]
        states = run_backbone(inner, drawn[:, None], mask, position[:, None], cache)[:, -1]
        position = position + 1
    return ids.cpu(), logp.cpu(), lengths.cpu(), ended.cpu()


def _prefill(
    model: PreTrainedModel, prompts: list[list[int]], room: int, device: torch.device
) -> tuple[Tensor, Tensor, KeyValueCache]:
    """Read the prompts, a few of like lengths at a time: their last states (P, H), their mask, and a cache
    with room for `room` more tokens.
    """
    tokens, mask = (x.to(device) for x in left_pad(prompts))
    width, whole = tokens.shape[1], model.config.get_text_config()._attn_implementation == NAME
    cache = KeyValueCache(width + room, whole)
    if len(prompts) <= PREFILL:
        return run_backbone(model, tokens, mask, positions_of(mask), cache)[:, -1], mask, cache
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    states = []
    for start in range(0, len(order), PREFILL):
        rows = order[start : start + PREFILL]
        span = len(prompts[rows[-1]])
        part, seen = KeyValueCache(span, whole), mask[rows, -span:]
        states.append(run_backbone(model, tokens[rows, -span:], seen, positions_of(seen), part)[:, -1])
        cache.receive(rows, part, len(prompts), width)
    back = torch.tensor(order, device=device).argsort()
    return torch.cat(states)[back], mask, cache


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-align rows of ids: tokens and mask, (N, P)."""
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = True
    return tokens, mask


def _rollouts(
    prompts: Sequence[Any],
    ids: list[list[int]],
    n: int,
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    columns: dict[str, list[Any]],
    sampler: Sampler,
) -> Rollouts:
    response_ids, logp, lengths, ended = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    width = int(lengths.max())
    response_mask = torch.arange(width) < lengths[:, None]
    tokens, mask = left_pad(ids)
    group = torch.arange(len(ids)).repeat_interleave(n)
    texts = [
        prompt if isinstance(prompt, str) else tokenizer.decode(row)
        for prompt, row in zip(prompts, ids, strict=True)
    ]
    responses = [
        tokenizer.decode(row[:length], skip_special_tokens=True)
        for row, length in zip(response_ids.tolist(), lengths.tolist(), strict=True)
    ]
    return Rollouts(
        tokens[group],
        mask[group],
        response_ids[:, :width],
        response_mask,
        logp[:, :width],
        ended,
        group,
        [texts[i] for i in group.tolist()],
        responses,
        {key: [values[i] for i in group.tolist()] for key, values in columns.items()},
        sampler.temperature,
        sampler.forbidden,
    )


def _prompt_ids(prompt: str | Sequence[int], tokenizer: PreTrainedTokenizerBase, row: int) -> list[int]:
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise UsageError(
            f"prompts: prompt {row + 1} has no token; a response needs at least one token before it."
        )
    return ids


def _check(
    prompts: Sequence[Any], n: int, max_new_tokens: int, temperature: float, top_p: float, top_k: int
) -> None:
    wrong = [
        (len(prompts) < 1, "prompts", len(prompts), "at least one prompt"),
        (n < 1, "n", n, "at least 1"),
        (max_new_tokens < 1, "max_new_tokens", max_new_tokens, "at least 1"),
        (
            not 0.0 <= temperature < float("inf"),
            "temperature",
            temperature,
            "0 (greedy) or a positive number",
        ),
        (not 0.0 < top_p <= 1.0, "top_p", top_p, "a number above 0 and at most 1"),
        (top_k < 0, "top_k", top_k, "0 (off) or a positive count"),
    ]
    for bad, option, value, expected in wrong:
        if bad:
            raise UsageError(f"{option}: got {value}, expected {expected}.")
