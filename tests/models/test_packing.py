"""Rows without padding: the layout as such, and every packed result against its padded twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from kleash.data.batches import Batch
from kleash.errors import UsageError
from kleash.models import RewardModel, batch_kl, batch_logprobs, last_token_states, load_model, states
from kleash.models import verify_forward as verify
from kleash.models.packing import ATTENTION, pack, share
from kleash.models.states import PACKABLE, packable, states_at
from kleash.training.adapters import AdaptersOff

WINDOWED = ("mistral", "gemma2", "gemma3_text")  # with windows of 4 and 5 in FAMILIES


def batch_of(
    lengths: list[int], shared: list[int] | None = None, *, left: bool = False, extra: int = 0, seed: int = 0
) -> Batch:
    """Rows of random ids, their second half trained; groups of equal size share their first `shared` ids."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) + extra
    tokens = torch.randint(3, VOCABULARY, (len(lengths), width), generator=generator)
    size = 1 if shared is None else len(lengths) // len(shared)
    for group, prefix in enumerate(shared or []):
        tokens[group * size : (group + 1) * size, :prefix] = tokens[group * size, :prefix].clone()
    length, column = torch.tensor(lengths)[:, None], torch.arange(width)
    mask = column < length
    start = torch.tensor(shared).repeat_interleave(size)[:, None] if shared else (length // 2).clamp_min(1)
    trained = mask & (column >= start)
    if left:
        tokens, mask, trained = (x.flip(1) for x in (tokens, mask, trained))
        tokens[mask] = tokens.flip(1)[mask.flip(1)]
        trained = mask & (mask.cumsum(1) > start)
    return Batch(tokens, mask, trained, size, None if shared is None else torch.tensor(shared))


def multi_turn() -> Batch:
    """Trained tokens in several runs of a row."""
    batch = batch_of([12, 7, 9])
    trained = torch.zeros_like(batch.response_mask)
    for row, at in ((0, (2, 3, 7, 11)), (1, (1, 6)), (2, (3, 5, 6, 8))):
        trained[row, list(at)] = True
    return replace(batch, response_mask=trained)


BATCHES: dict[str, Callable[[], Batch]] = {
    "rows": lambda: batch_of([7, 8, 3, 10]),
    "left-padded": lambda: batch_of([7, 8, 3, 10], left=True),
    "one row": lambda: batch_of([6], extra=3),
    "very different": lambda: batch_of([2, 40, 3, 2, 5]),
    "turns": multi_turn,
    "pairs": lambda: batch_of([8, 11, 6, 3, 9, 9], [5, 2, 8], extra=2),
    "group of 8": lambda: batch_of([9, 7, 12, 8, 7, 15, 7, 10], [6]),
}


# ---- the layout


@st.composite
def any_batch(draw: st.DrawFn) -> Batch:
    size = draw(st.integers(1, 4))
    shared = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    tails = draw(st.lists(st.integers(1, 9), min_size=size * len(shared), max_size=size * len(shared)))
    lengths = [shared[row // size] + tail for row, tail in enumerate(tails)]
    left, extra = draw(st.booleans()), draw(st.integers(0, 3))
    if draw(st.booleans()):
        return batch_of(lengths, shared, extra=extra)
    return batch_of(lengths, left=left, extra=extra)


def check_layout(batch: Batch) -> int:
    """Every token of every row stands somewhere, with its position, and sees its own row up to itself and
    nothing else; the number of places taken.
    """
    packed = pack(batch)
    width = packed.tokens.shape[1]
    assert int(packed.place.max()) < packed.tokens.numel()
    for row, real in enumerate(batch.attention_mask):
        place = packed.place[row, real]
        assert torch.equal(packed.tokens.flatten()[place], batch.tokens[row, real])
        assert torch.equal(packed.positions.flatten()[place], torch.arange(len(place)))
        line = int(place[0]) // width
        for at in range(len(place)):
            seen = packed.allowed[line, place[at] % width].nonzero()[:, 0] + line * width
            assert sorted(seen.tolist()) == sorted(place[: at + 1].tolist())
    return len(packed.place[batch.attention_mask].unique())


@settings(max_examples=60, deadline=None)
@given(any_batch())
def test_places_are_a_bijection_but_for_shared_prefixes(batch: Batch) -> None:
    taken = check_layout(batch)
    repeated = 0
    if batch.shared_prefix is not None:
        repeated = int(batch.shared_prefix.sum()) * (batch.group_size - 1)
    assert taken == batch.real_tokens - repeated


def test_a_group_of_long_answers_is_cut_and_keeps_its_prefix_in_each_part() -> None:
    batch = batch_of([200] * 16, [100])
    copies = pack(batch).place[:, 0].unique()
    assert len(copies) == 4
    assert check_layout(batch) == 16 * 100 + 100 * len(copies)


def test_long_rows_stay_apart_and_short_ones_stand_together() -> None:
    assert sorted(len(line) for line in share([2048, 2000] * 32)) == [1] * 64
    lines, width = pack(batch_of([100, 60, 40, 30, 70])).tokens.shape
    assert lines * width == 300


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(0, 500))
def test_pieces_are_dealt_once_at_no_more_than_the_cost_of_one_line_or_of_a_line_each(
    sizes: list[int], head: int
) -> None:
    def cost(lines: list[list[int]]) -> float:
        width = head + max(sum(sizes[i] for i in line) for line in lines)
        return len(lines) * width * (1 + width / ATTENTION)

    lines = share(sizes, head=head)
    assert sorted(i for line in lines for i in line) == list(range(len(sizes)))
    together, apart = [list(range(len(sizes)))], [[i] for i in range(len(sizes))]
    assert cost(lines) <= cost(together)
    if len(sizes) < 32:  # beyond, not every number of lines is tried
        assert cost(lines) <= cost(apart)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_no_line_is_much_wider_than_the_longest_row_or_the_scores_allow(sizes: list[int]) -> None:
    width = max(sum(sizes[i] for i in line) for line in share(sizes))
    assert width <= 2 * max(ATTENTION, *sizes)


# ---- the padded twin


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Batch]]:
    """The batches that were packed."""
    found: list[Batch] = []

    def spy(batch: Batch) -> object:
        found.append(batch)
        return pack(batch)

    monkeypatch.setattr(states, "pack", spy)
    yield found


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], object]:
    """Run something with packing off."""

    def run(call: Callable[[], object]) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(states, "packable", lambda model, longest: False)
            return call()

    return run


def wide(family: str, seed: int = 0) -> PreTrainedModel:
    """The family's tiny model; a window, where it has one, holds every row here."""
    changes = {"sliding_window": 64} if family in WINDOWED else {}
    return load_model((tiny(family, seed, **changes), None))[0]


def outcome(model: nn.Module, result: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A result and the gradients of a weighted sum of it."""
    model.zero_grad()
    value = result()
    (value * torch.linspace(0.5, 1.5, value.numel()).view(value.shape)).sum().backward()
    return value.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(got: object, expected: object) -> None:
    torch.testing.assert_close(got[0], expected[0], atol=2e-5, rtol=1e-5)  # type: ignore[index]
    for one, other in zip(got[1], expected[1], strict=True):  # type: ignore[index]
        torch.testing.assert_close(one, other, atol=2e-5 * float(other.abs().max() + 1), rtol=1e-4)


def test_every_packable_kind_is_tested() -> None:
    assert set(FAMILIES) >= PACKABLE


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", sorted(PACKABLE))
def test_packed_rows_equal_padded_rows_in_values_and_gradients(
    family: str, kind: str, packs: list[Batch], padded: Callable[..., object]
) -> None:
    """Reports 20 and 21: rows side by side do not see each other, and no target crosses over."""
    model, batch = wide(family), BATCHES[kind]()

    def run() -> object:
        return outcome(model, lambda: batch_logprobs(model, batch)[0])

    expected = padded(run)
    assert not packs
    assert_same(run(), expected)
    assert packs


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("kind", ["rows", "pairs"])
def test_rows_longer_than_a_window_run_padded_and_right(family: str, kind: str, packs: list[Batch]) -> None:
    model, batch = load_model((tiny(family), None))[0], BATCHES[kind]()
    logp, _ = batch_logprobs(model, batch)
    assert not packs
    for row in range(len(batch)):
        ids, trained = batch.tokens[row][batch.attention_mask[row]], batch.response_mask[row]
        plain = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        expected = plain[trained[batch.attention_mask[row]][1:]]
        torch.testing.assert_close(logp[row, : len(expected)], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "qwen3_moe"])
def test_the_models_own_attention_takes_the_mask(
    family: str, attention: str, packs: list[Batch], padded: Callable[..., object]
) -> None:
    model, batch = wide(family), BATCHES["pairs"]()
    model.set_attn_implementation(attention)

    def run() -> object:
        return outcome(model, lambda: batch_logprobs(model, batch)[0])

    assert_same(run(), padded(run))
    assert len(packs) == 1


@pytest.mark.parametrize("attention", ["eager", "sdpa", "kleash_grouped"])
def test_in_bfloat16_packing_is_as_accurate_as_padding(
    attention: str, padded: Callable[..., object], packs: list[Batch]
) -> None:
    model, batch = wide("llama"), BATCHES["group of 8"]()
    exact, mask = batch_logprobs(model, batch)
    model.set_attn_implementation(attention)

    def error() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            return (batch_logprobs(model, batch)[0] - exact)[mask].square().mean().sqrt()

    assert 0 < float(error()) < 2 * float(padded(error))  # type: ignore[arg-type]
    assert len(packs) == 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["rows", "pairs", "left-padded"])
def test_scores_and_their_gradients_equal_padded_ones(
    family: str, kind: str, packs: list[Batch], padded: Callable[..., object]
) -> None:
    torch.manual_seed(0)
    reward, batch = RewardModel.from_policy(wide(family), None), BATCHES[kind]()
    nn.init.normal_(reward.score.weight)

    def run() -> object:
        return outcome(reward, lambda: reward.scores(batch))

    assert_same(run(), padded(run))
    assert len(packs) == 1


def test_adapters_learn_the_same_and_switch_off(packs: list[Batch], padded: Callable[..., object]) -> None:
    model, batch = (
        get_peft_model(wide("llama"), LoraConfig(r=2, target_modules="all-linear")),
        BATCHES["pairs"](),
    )
    reference = AdaptersOff(model)
    assert batch_kl(model, reference, batch).kl.abs().max() == 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)

    def run() -> object:
        return outcome(model, lambda: batch_logprobs(model, batch)[0])

    assert_same(run(), padded(run))
    found = batch_kl(model, reference, batch).kl
    assert found.max() > 1e-3
    torch.testing.assert_close(
        found, padded(lambda: batch_kl(model, reference, batch).kl), atol=2e-5, rtol=1e-4
    )
    assert len(packs) == 5


def test_policy_and_reference_each_take_their_own_path(
    packs: list[Batch], padded: Callable[..., object]
) -> None:
    policy, reference, batch = wide("llama"), load_model((tiny("mistral", 1), None))[0], BATCHES["pairs"]()
    found = batch_kl(policy, reference, batch).kl
    assert len(packs) == 1
    torch.testing.assert_close(
        found, padded(lambda: batch_kl(policy, reference, batch).kl), atol=2e-5, rtol=1e-4
    )


def test_gradient_checkpointing_changes_nothing(packs: list[Batch]) -> None:
    model, batch = wide("llama"), BATCHES["pairs"]()

    def run() -> object:
        return outcome(model, lambda: batch_logprobs(model, batch)[0])

    expected = run()
    model.gradient_checkpointing_enable()
    model.train()
    assert_same(run(), expected)
    assert len(packs) == 2


def test_dropout_draws_anew_in_training_mode(packs: list[Batch]) -> None:
    model, batch = (
        load_model((tiny("gpt2", resid_pdrop=0.3, attn_pdrop=0.3, embd_pdrop=0.0), None))[0],
        BATCHES["rows"](),
    )
    model.train()
    one, other = (outcome(model, lambda: batch_logprobs(model, batch)[0]) for _ in range(2))
    assert torch.isfinite(one[0]).all() and not torch.equal(one[0], other[0])
    assert all(torch.isfinite(gradient).all() for gradient in one[1])
    assert len(packs) == 2


# ---- what must not matter


@pytest.mark.parametrize("kind", ["rows", "left-padded", "pairs"])
def test_ids_in_padding_are_never_read(kind: str) -> None:
    model, batch = wide("llama"), BATCHES[kind]()
    other = replace(batch, tokens=torch.where(batch.attention_mask, batch.tokens, VOCABULARY - 1))
    assert torch.equal(batch_logprobs(model, batch)[0], batch_logprobs(model, other)[0])


def test_the_order_of_rows_and_groups_does_not_matter() -> None:
    model = wide("llama")
    for kind, size in (("rows", 1), ("pairs", 2)):
        batch = BATCHES[kind]()
        groups = torch.randperm(len(batch) // size, generator=torch.Generator().manual_seed(1))
        rows = (groups[:, None] * size + torch.arange(size)).flatten()
        moved = Batch(
            batch.tokens[rows],
            batch.attention_mask[rows],
            batch.response_mask[rows],
            size,
            None if batch.shared_prefix is None else batch.shared_prefix[groups],
        )
        expected = batch_logprobs(model, batch)[0][rows]
        torch.testing.assert_close(batch_logprobs(model, moved)[0], expected, atol=1e-5, rtol=1e-5)


def test_a_row_may_end_with_its_prefix_and_train_inside_it() -> None:
    """Both read states that the whole group shares."""
    model = wide("llama")
    batch = batch_of([5, 8, 5, 6], [5, 2])
    batch.response_mask = batch.attention_mask & (torch.arange(8) > 0)
    whole = replace(batch, group_size=1, shared_prefix=None)
    torch.testing.assert_close(batch_logprobs(model, batch)[0], batch_logprobs(model, whole)[0])
    torch.testing.assert_close(last_token_states(model, batch), last_token_states(model, whole))


def test_nothing_precedes_the_first_token_wherever_the_padding_is() -> None:
    batch = batch_of([4, 6], left=True)
    batch.response_mask = batch.attention_mask
    with pytest.raises(ValueError, match="first token of a row"):
        batch_logprobs(wide("llama"), batch)


def test_a_full_batch_without_prefixes_runs_as_it_is(packs: list[Batch]) -> None:
    batch_logprobs(wide("llama"), batch_of([6, 6, 6]))
    assert not packs


def test_gradients_of_a_shared_state_add_up_in_a_fixed_order() -> None:
    """Resumed runs are bit-identical, on several threads too."""
    torch.manual_seed(0)
    values, place = torch.randn(400, 64, requires_grad=True), torch.randint(0, 400, (1500,))
    place[::3], gradient = 7, torch.randn(1500, 64)
    torch.set_num_threads(4)
    try:
        found = [torch.autograd.grad(states_at(values, place), values, gradient)[0] for _ in range(30)]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(states_at(values, place), values[place])
    assert all(torch.equal(each, found[0]) for each in found)


# ---- which models


def test_only_known_kinds_with_full_attention_are_packed() -> None:
    assert packable(tiny("llama"), 10**6)
    assert packable(tiny("mistral"), 5) and not packable(tiny("mistral"), 6)
    assert packable(tiny("gemma2"), 4) and not packable(tiny("gemma2"), 5)
    assert packable(tiny("falcon"), 9) and not packable(tiny("falcon", alibi=True), 9)
    for name, value in (
        ("_attn_implementation", "flash_attention_2"),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("model_type", "llama_of_another_kind"),
    ):
        model = tiny("qwen3")
        assert packable(model, 9)
        setattr(model.config, name, value)
        assert not packable(model, 9), name


def test_alibi_runs_padded_and_right(packs: list[Batch]) -> None:
    model, batch = load_model((tiny("falcon", alibi=True), None))[0], BATCHES["rows"]()
    logp, _ = batch_logprobs(model, batch)
    assert not packs
    ids = batch.tokens[0, :7]
    plain = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(logp[0, :4], plain[2:], atol=1e-5, rtol=1e-5)


def test_verify_forward_refuses_a_model_whose_rows_see_each_other(packs: list[Batch]) -> None:
    model = wide("llama")
    assert verify(model) < 1e-4 and len(packs) == 1
    plain = model.model.forward

    def deaf(attention_mask: Tensor, **options: object) -> object:
        return plain(attention_mask=attention_mask if attention_mask.ndim == 2 else None, **options)

    model.model.forward = deaf
    with pytest.raises(UsageError, match="its head or its attention does something"):
        verify(model)
