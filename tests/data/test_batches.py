"""Padding and masks by position, and the plan of an epoch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.data.batches import Batch, collate_examples, collate_pairs, plan_epoch
from kleash.data.items import Example, Pair
from kleash.errors import UsageError


def example(prompt: list[int], response: list[int], trained: list[bool] | None = None) -> Example:
    return Example(prompt, response, trained or [True] * len(response), number=1)


def test_report_10_pad_id_equals_eos() -> None:
    batch = collate_examples([example([7], [8, 2]), example([7], [8, 9, 9, 2])], pad_id=2)
    assert batch.tokens[0].tolist() == [7, 8, 2, 2, 2]
    assert batch.response_mask[0].tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]  # the real end token is trained
    assert batch.attention_mask[0].tolist() == [True, True, True, False, False]


def test_report_11_padding_is_never_a_target() -> None:
    short, long = example([1, 5], [6]), example([1, 5, 5], [6, 6, 3])
    alone, together = collate_examples([short], pad_id=6), collate_examples([short, long], pad_id=6)
    assert (
        alone.tokens[alone.response_mask].tolist() == together.tokens[:1][together.response_mask[:1]].tolist()
    )
    assert not (together.response_mask & ~together.attention_mask).any()


def test_report_19_first_response_token_is_trained() -> None:
    batch = collate_examples([example([1, 2], [3, 4, 5])], pad_id=0)
    assert batch.response_mask[0].tolist() == [False, False, True, True, True]


def test_report_24_every_row_keeps_its_own_tokens() -> None:
    rows = [example([1], [2, 3]), example([1, 2, 3, 4], [5, 6, 7, 8])]
    batch = collate_examples(rows, pad_id=0)
    for i, row in enumerate(rows):
        assert batch.tokens[i][batch.attention_mask[i]].tolist() == row.prompt_ids + row.response_ids


def test_report_27_a_row_is_the_same_alone_and_in_a_batch() -> None:
    rows = [example([4, 5], [6]), example([4] * 6, [7] * 5)]
    together = collate_examples(rows, pad_id=0)
    alone = collate_examples(rows[:1], pad_id=0)
    assert together.tokens[0, :3].tolist() == alone.tokens[0].tolist()
    assert together.attention_mask[0].sum() == alone.attention_mask[0].sum() == 3


def test_report_28_the_end_is_the_last_attended_position() -> None:
    batch = collate_pairs([Pair([1], [5, 2], [6, 7, 8, 2], number=1)], pad_id=2)
    last = batch.attention_mask.sum(1) - 1
    assert last.tolist() == [2, 4]
    assert batch.tokens.gather(1, last[:, None]).flatten().tolist() == [2, 2]


def test_report_59_a_row_without_a_trained_token_is_refused() -> None:
    with pytest.raises(ValueError, match="must have a trained token"):
        collate_examples([example([1, 2], [3], [False])], pad_id=0)
    with pytest.raises(ValueError, match="a token before"):
        collate_examples([example([], [3])], pad_id=0)
    with pytest.raises(ValueError, match="2 ids but 3 mask entries"):
        collate_examples([example([1], [3], [True, True])], pad_id=0)


def test_untrained_turns_inside_a_response_stay_untrained() -> None:
    batch = collate_examples([example([1], [2, 3, 4, 5], [True, False, False, True])], pad_id=0)
    assert batch.response_mask[0].tolist() == [False, True, False, False, True]
    assert (batch.response_lengths.tolist(), batch.trained_tokens, batch.real_tokens) == ([2], 2, 5)


def test_pairs_are_chosen_then_rejected_and_share_their_prompt() -> None:
    pairs = [Pair([1, 2, 3], [4], [5, 6], number=7), Pair([1], [8, 8, 8], [9], number=9)]
    batch = collate_pairs(pairs, pad_id=0, index=[11, 5])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 0], [1, 2, 3, 5, 6], [1, 8, 8, 8, 0], [1, 9, 0, 0, 0]]
    assert batch.group_size == 2 and batch.shared_prefix is not None and batch.index is not None
    assert batch.shared_prefix.tolist() == [3, 1] and batch.index.tolist() == [11, 5]
    assert batch.response_lengths.tolist() == [1, 2, 3, 1]


def test_to_moves_every_tensor_and_keeps_the_rest() -> None:
    batch = collate_pairs([Pair([1], [2], [3], number=1)], pad_id=0, index=[4])
    moved = batch.to("meta")
    assert isinstance(moved, Batch) and moved.group_size == 2
    for name in ("tokens", "attention_mask", "response_mask", "shared_prefix", "index"):
        assert getattr(moved, name).device.type == "meta"
    assert collate_examples([], pad_id=0).tokens.shape == (0, 0)


# ---- the plan of an epoch ----

plans = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=60),
        "batch_size": st.integers(1, 20),
        "micro_batch_size": st.none() | st.integers(1, 9),
        "token_budget": st.none() | st.integers(80, 400),
        "rows_per_item": st.integers(1, 2),
        "seed": st.integers(0, 5),
        "epoch": st.integers(0, 5),
    }
)


def all_ranks(plan: dict, world: int) -> list[list[list[list[int]]]]:
    return [plan_epoch(**plan, rank=rank, world=world) for rank in range(world)]


@given(plans, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_every_index_once_over_all_ranks(plan: dict, world: int) -> None:
    ranks = all_ranks(plan, world)
    seen = [i for steps in ranks for step in steps for micro in step for i in micro]
    assert sorted(seen) == list(range(len(plan["lengths"])))


@given(plans, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_steps_are_full_but_the_last(plan: dict, world: int) -> None:
    ranks = all_ranks(plan, world)
    sizes = [sum(len(micro) for steps in ranks for micro in steps[s]) for s in range(len(ranks[0]))]
    rows, batch = len(plan["lengths"]), plan["batch_size"]
    assert sizes == [batch] * (rows // batch) + ([rows % batch] if rows % batch else [])


@given(plans, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_limits_hold_and_ranks_take_equally_many_micro_batches(plan: dict, world: int) -> None:
    ranks = all_ranks(plan, world)
    for step in zip(*ranks, strict=True):
        assert len({len(micros) for micros in step}) == 1  # report 70: the same collectives on every rank
        for micro in (micro for micros in step for micro in micros if micro):
            longest = max(plan["lengths"][i] for i in micro)
            assert plan["micro_batch_size"] is None or len(micro) <= plan["micro_batch_size"]
            assert (
                plan["token_budget"] is None
                or plan["rows_per_item"] * len(micro) * longest <= plan["token_budget"]
            )


@given(plans)
@settings(max_examples=100, deadline=None)
def test_micro_batches_hold_neighbours_in_length(plan: dict) -> None:
    lengths = plan["lengths"]
    for step in plan_epoch(**plan):
        flat = [lengths[i] for micro in step for i in micro]
        assert flat == sorted(flat, reverse=True)


def test_sorting_saves_padding() -> None:
    lengths = [3, 90, 5, 80, 4, 85, 6, 95] * 8
    (step,) = plan_epoch(lengths, batch_size=64, micro_batch_size=4, seed=0, epoch=0)
    padded = sum(len(micro) * max(lengths[i] for i in micro) for micro in step)
    in_file_order = 64 * 95
    assert padded < 1.05 * sum(lengths) < 0.6 * in_file_order


def test_report_64_66_the_plan_of_an_epoch_is_a_pure_function() -> None:
    arguments = {"lengths": list(range(1, 21)), "batch_size": 4, "micro_batch_size": 2, "seed": 3}
    first = [plan_epoch(**arguments, epoch=epoch) for epoch in range(3)]
    again = [plan_epoch(**arguments, epoch=epoch) for epoch in (2, 1, 0)][::-1]
    assert first == again
    assert first[0] != first[1] != first[2]
    assert plan_epoch(**{**arguments, "seed": 4}, epoch=0) != first[0]


def test_the_order_of_an_epoch_is_pinned() -> None:
    """A changed shuffle would silently change what every resumed run trains on."""
    assert plan_epoch([1] * 6, batch_size=2, seed=0, epoch=0) == [[[0, 5]], [[1, 4]], [[3, 2]]]


def test_the_step_does_not_depend_on_the_world_size() -> None:
    lengths = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6]
    for world in (1, 2, 3):
        ranks = [
            plan_epoch(lengths, batch_size=4, seed=1, epoch=0, rank=r, world=world) for r in range(world)
        ]
        steps = [sorted(i for steps in ranks for micro in steps[s] for i in micro) for s in range(3)]
        assert steps == [sorted(step[0]) for step in plan_epoch(lengths, batch_size=4, seed=1, epoch=0)]


def test_report_70_three_rows_on_two_ranks() -> None:
    ranks = [
        plan_epoch([4, 5, 6], batch_size=3, micro_batch_size=1, seed=0, epoch=0, rank=r, world=2)
        for r in (0, 1)
    ]
    assert [[len(micro) for micro in steps[0]] for steps in ranks] == [[1, 1], [1, 0]]


def test_work_is_spread_over_ranks() -> None:
    ranks = [
        plan_epoch([5] * 8, batch_size=8, micro_batch_size=8, seed=0, epoch=0, rank=r, world=2)
        for r in (0, 1)
    ]
    assert [len(steps[0][0]) for steps in ranks] == [4, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_budget": 8}, "micro_batch_tokens=8 cannot hold the longest item, which takes 9 tokens"),
        ({"token_budget": 17, "rows_per_item": 2}, "takes 18 tokens"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"rank": 2, "world": 2}, "rank 2 of 2"),
    ],
)
def test_impossible_limits_are_named(change: dict, message: str) -> None:
    arguments = {"batch_size": 2, "seed": 0, "epoch": 0, **change}
    with pytest.raises(UsageError, match=message):
        plan_epoch([3, 9, 2], **arguments)


def test_masks_are_bool_and_ids_long() -> None:
    batch = collate_examples([example([1], [2])], pad_id=0, index=[0])
    assert batch.tokens.dtype == torch.long and batch.index is not None and batch.index.dtype == torch.long
    assert batch.attention_mask.dtype == batch.response_mask.dtype == torch.bool
