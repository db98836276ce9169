"""Rows without padding: the tokens of many rows side by side in few lines, a group's shared prefix once.

    rows, padded                lines
    p p p a a a .               p p p a a a b b b b       (rows a and b of a group share the prefix p)
    p p p b b b b               c c c c c d d d . .       (rows c and d share nothing)
    c c c c c . .
    d d d . . . .

Pure layout, no model: what stands where, which position each token has, and who may look at whom. A line is
a row of the forward pass; its mask shows each token its own row alone, up to itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kleash.data.batches import Batch

# Width of a line at which its scores cost as much as all its other work. A layer of hidden size H spends
# about 24 H² operations a token on its products and 4 H W on scores, whose mask and softmax make them about
# three times as dear (measured on a CPU): W = 2 H, here for a small model. A larger one could afford wider
# lines and loses little without them.
ATTENTION = 1000
TRIALS = 32  # about so many numbers of lines are tried: many short rows are laid out in milliseconds


@dataclass(frozen=True)
class Packed:
    """Lines of tokens, and where each token of a batch went.

    tokens, positions (B, W) long, 0 at the end of a line that is not full. allowed (B, W, W) bool: whether
    query i of a line may look at key j. place (N, T) long: which of the B·W tokens stands for token t of row
    n; 0 for padding.
    """

    tokens: Tensor
    positions: Tensor
    allowed: Tensor
    place: Tensor


def pack(batch: Batch) -> Packed:
    """Lay a batch out without padding, which may be on either side of its rows.

    Rows of a group share one copy of their prefix. A group is cut into parts, each with a copy, where its
    answers are so long that the scores between them would cost more than the prefix saves.
    """
    mask = batch.attention_mask
    lengths, shared = mask.sum(1), torch.zeros(len(mask), dtype=torch.long, device=mask.device)
    if batch.shared_prefix is not None:
        shared = batch.shared_prefix.repeat_interleave(batch.group_size)
    seats = _seats(lengths.tolist(), shared.tolist(), batch.group_size)
    part, head, tail = torch.tensor(seats.rows, device=mask.device).T[:, :, None]  # (N, 1) each
    shared, row = shared[:, None], torch.arange(len(mask), device=mask.device)[:, None]
    position = (mask.cumsum(1) - 1).clamp_min(0)
    common = position < shared
    place = torch.where(common, head + position, tail + position - shared).masked_fill(~mask, 0)

    def lay(values: Tensor, empty: int) -> Tensor:
        """Values (N, T) of the rows' tokens, or (N, 1) of the rows, laid at the tokens' places (B, W)."""
        out = values.new_full((seats.lines * seats.width,), empty)
        out[place[mask]] = values.expand_as(mask)[mask]
        return out.view(seats.lines, seats.width)

    # Segments: the tail of each row and the prefix of each part, which stands before the tails. The empty end
    # of a line is one more and sees only itself.
    segment = lay(torch.where(common, len(mask) + part, row), -1)
    prefix = lay(len(mask) + part, -1)
    own = (segment[:, None] == segment[:, :, None]) | (segment[:, None] == prefix[:, :, None])
    return Packed(lay(batch.tokens, 0), lay(position, 0), own.tril_(), place)


@dataclass(frozen=True)
class _Seats:
    """Size of the lines; for each row the number of its part and the places where its head and tail begin."""

    rows: list[tuple[int, int, int]]
    lines: int
    width: int


def _seats(lengths: Sequence[int], shared: Sequence[int], group_size: int) -> _Seats:
    """Rows to parts (one copy of a prefix and the tails of some rows), parts to lines, one after another."""
    tails = [length - prefix for length, prefix in zip(lengths, shared, strict=True)]
    parts = []
    for first in range(0, len(lengths), group_size):
        cut = share(tails[first : first + group_size], head=shared[first])
        parts += [[first + i for i in part] for part in cut]
    sizes = [shared[part[0]] + sum(tails[row] for row in part) for part in parts]
    lines = share(sizes)
    width = max(sum(sizes[number] for number in line) for line in lines)
    rows = [(0, 0, 0)] * len(lengths)
    for start, line in enumerate(lines):
        at = start * width
        for number in line:
            head, at = at, at + shared[parts[number][0]]
            for row in parts[number]:
                rows[row] = (number, head, at)
                at += tails[row]
    return _Seats(rows, len(lines), width)


def share(sizes: Sequence[int], *, head: int = 0) -> list[list[int]]:
    """Deal pieces over lines that each begin with `head` tokens more: the pieces' indices, line by line.

    B lines of W tokens cost B·W·(1 + W/ATTENTION). Few wide lines hold little padding and repeat the head
    seldom; many narrow ones hold few scores of tokens that never see each other; the cheapest number of lines
    is taken. It bounds memory too, some of which is kept by token (B·W) and some by score (B·W²): beyond the
    longest piece and ATTENTION, a wider line costs more than any padding that it saves.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    best, least = [order], float("inf")
    for count in (*range(1, len(sizes), max(1, len(sizes) // TRIALS)), len(sizes)):
        if _cost(count, head + sizes[order[0]]) >= least:
            break  # no line is narrower than the longest piece: more of them only cost more
        lines, load = _deal(order, sizes, count)
        if _cost(count, head + load) < least:
            best, least = lines, _cost(count, head + load)
    return best


def _cost(lines: int, width: int) -> float:
    return lines * width * (1 + width / ATTENTION)


def _deal(order: Sequence[int], sizes: Sequence[int], count: int) -> tuple[list[list[int]], int]:
    """Each piece, longest first, to the line that holds least; the lines and the load of the fullest."""
    lines: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, line) for line in range(count)]
    for i in order:
        load, line = loads[0]
        lines[line].append(i)
        heapq.heapreplace(loads, (load + sizes[i], line))
    return lines, max(load for load, _ in loads)
