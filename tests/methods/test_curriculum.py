"""Which prompts are drawn: the edge of ability first, rest for what is learnt, the same on every process."""

from __future__ import annotations

import json
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from steps import bench, in_two

from kleash.methods.base import Memory
from kleash.methods.curriculum import draw, weight
from kleash.training import train
from kleash.training.feed import OnlineFeed

RULE = {"retire_after": 2, "revisit_every": 10}


@pytest.mark.parametrize(
    ("visits", "step", "value"),
    [
        ([], 7, 1.0),
        ([[1, 2, 4]], 7, 1.0),
        ([[1, 0, 4]], 7, 4 * (1 / 6) * (5 / 6)),
        ([[1, 4, 4]], 7, 4 * (5 / 6) * (1 / 6)),
        ([[1, 4, 4], [3, 1, 4]], 7, 4 * (2 / 6) * (4 / 6)),
        ([[1, 4, 4], [3, 4, 4]], 7, 0.0),
        ([[1, 4, 4], [3, 4, 4]], 12, 0.0),
        ([[1, 4, 4], [3, 4, 4]], 13, 1.0),
        ([[1, 4, 4], [3, 4, 4], [13, 4, 4]], 14, 0.0),
        ([[1, 4, 4], [3, 4, 4], [13, 3, 4]], 14, 4 * (4 / 6) * (2 / 6)),
    ],
    ids=[
        "untried", "half right", "all wrong", "all right once", "the last visit counts", "rests",
        "rests still", "comes back", "rests again", "has forgotten",
    ],
)  # fmt: skip
def test_003_35_what_a_prompt_is_worth(visits: list[list[int]], step: int, value: float) -> None:
    assert weight(visits, step, **RULE) == pytest.approx(value)


def memory(tries: dict[int, list[list[int]]]) -> Memory:
    return Memory(tries=tries)


def test_003_35_draws_follow_the_weights_without_replacement() -> None:
    """Half right is drawn as often as untried, 1.8 times as often as all wrong; the resting never."""
    tries = {2: [[1, 4, 8]], 3: [[1, 0, 8]], 4: [[1, 8, 8], [2, 8, 8]]}
    counts: Counter[int] = Counter()
    for step in range(3000):
        places = draw(memory(tries), [1, 2, 3, 4], 1, 3, seed=step, **RULE)
        counts.update(places)
    share = weight(tries[3], 3, **RULE)
    assert counts[3] == 0
    assert counts[1] / counts[0] == pytest.approx(1.0, abs=0.12)
    assert counts[2] / counts[0] == pytest.approx(share, abs=0.08)
    for step in range(20):
        assert sorted(draw(memory(tries), [1, 2, 3, 4], 3, 3, seed=step, **RULE)) == [0, 1, 2]
        assert len(set(draw(memory(tries), [1, 2, 3, 4], 4, 3, seed=step, **RULE))) == 4, (
            "the resting fill up"
        )


def test_draws_depend_on_seed_and_step_alone() -> None:
    numbers = list(range(50))
    first = [draw(Memory(), numbers, 10, step, 0, **RULE) for step in range(5)]
    assert first == [draw(Memory(), numbers, 10, step, 0, **RULE) for step in range(5)]
    assert len({tuple(places) for places in first}) == 5
    assert first[0] != draw(Memory(), numbers, 10, 0, 1, **RULE)


def feed(tiny: Any, rank: int, world: int, asked: list[list[int]], **changes: Any) -> OnlineFeed:
    """A feed of one of several processes, that notes which prompts it samples."""
    it = bench("grpo", tiny, prompts=12, batch_size=16, curriculum="edge", **changes)

    def collect(models: Any, prompts: Any, config: Any, context: Any) -> Any:
        asked.append([prompt.number for prompt in prompts])
        return context.more(3)

    method = types.SimpleNamespace(collect=collect)
    processes = types.SimpleNamespace(rank=rank, world=world, main=rank == 0, gather=lambda t: t)
    it.models.memory.tries = {n: [[1, n % 5, 4]] for n in range(1, 9)}
    return OnlineFeed(method, it.models, it.prompts, [], it.config, processes)  # type: ignore[arg-type]


def test_every_process_draws_the_same_and_takes_its_share(tiny: Any) -> None:
    asked: list[list[list[int]]] = [[], [], []]
    one, *two = (
        feed(tiny, rank, world, a) for (rank, world), a in zip([(0, 1), (0, 2), (1, 2)], asked, strict=True)
    )
    for step in range(2, 8):
        one.step(step)
        further = [p.number for process in two for p in process.step(step)]
        drawn = asked[1][-1] + asked[2][-1] + further
        assert further and len(set(drawn)) == len(drawn), "no prompt twice in a step"
    assert [a + b for a, b in zip(asked[1], asked[2], strict=True)] == asked[0]
    assert len({tuple(sorted(places)) for places in asked[0]}) > 3


def test_both_processes_remember_the_visits_of_both(tiny: Any) -> None:
    def work(first: int) -> Any:
        def run(gather: Any) -> dict[int, list[list[int]]]:
            it = bench("grpo", tiny, prompts=4)
            it.prompts = it.prompts[first : first + 2]
            it.collect(gather=gather)
            return it.models.memory.tries

        return run

    here, there = in_two(work(0), work(2))
    assert here == there and sorted(here) == [1, 2, 3, 4]


def graded(prompts: list[str], responses: list[str], kind: list[str]) -> list[float]:
    """Always right, always wrong, or every other response right."""
    sure = {"easy": 1.0, "hard": 0.0}
    return [sure.get(k, float(i % 2)) for i, k in enumerate(kind)]


def rows(tiny: Any) -> list[dict[str, Any]]:
    kinds = ["easy", "hard", "edge"] * 4
    return [
        {"prompt": row["prompt"], "kind": kind} for row, kind in zip(tiny.prompts(12), kinds, strict=True)
    ]


def run_graded(tiny: Any, out: Path, steps: int, **changes: Any) -> Any:
    return train(
        "rloo",
        **tiny.options(
            "rloo", out, data=rows(tiny), reward=graded, eval_fraction=0.0, curriculum="edge", retire_after=1,
            revisit_every=20, beta=0.0, steps=steps, save_every=steps, max_new_tokens=2, learning_rate=1e-4,
            **changes,
        ),
    )  # fmt: skip


def visits(run: Any, step: int) -> dict[str, Counter[int]]:
    """How often each prompt of each kind was visited, from the checkpoint."""
    state = json.loads((run.checkpoints / f"step-{step:06d}" / "state.json").read_text())
    out: dict[str, Counter[int]] = {"easy": Counter(), "hard": Counter(), "edge": Counter()}
    for number, each in state["memory"]["tries"].items():
        kind = ["easy", "hard", "edge"][(int(number) - 1) % 3]
        out[kind][int(number)] = len(each)
    return out


def test_003_35_a_run_spends_its_samples_at_the_edge(tiny: Any, tmp_path: Path) -> None:
    """Two prompts a step. What is always right is tried once and rests; what is sometimes right is tried
    most.
    """
    run = run_graded(tiny, tmp_path / "run", 19)
    found = visits(run, 19)
    total = {kind: sum(counts.values()) for kind, counts in found.items()}
    assert sum(total.values()) == 38 and total["easy"] <= 4
    assert max(found["easy"].values(), default=0) == 1, "revisited after 20 steps at the earliest"
    assert total["edge"] > 1.3 * total["hard"], total


def test_003_35_what_rests_is_revisited(tiny: Any, tmp_path: Path) -> None:
    run = run_graded(tiny, tmp_path / "run", 30)
    assert max(visits(run, 30)["easy"].values()) == 2


def test_report_64_the_curriculum_resumes_where_it_was(tiny: Any, tmp_path: Path) -> None:
    whole = run_graded(tiny, tmp_path / "whole", 9)
    run_graded(tiny, tmp_path / "run", 4)
    again = run_graded(tiny, tmp_path / "run", 9, resume=True)
    assert visits(whole, 9) == visits(again, 9)
    a, b = ((run.checkpoints / "step-000009" / "weights.safetensors").read_bytes() for run in (whole, again))
    assert a == b


def test_without_a_curriculum_every_prompt_has_its_turn(tiny: Any) -> None:
    asked: list[list[int]] = []
    it = feed(tiny, 0, 1, asked)
    it.config.curriculum = "off"
    for step in range(1, 4):
        it.step(step)
    assert sorted(n for numbers in asked for n in numbers) == list(range(1, 13))
