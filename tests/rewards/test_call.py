"""Calling rewards: what they may ask for, what they may return, and what happens when they do neither."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import kleash
from kleash.errors import RunError, UsageError
from kleash.rewards import CombinedReward, Scores, call_reward, load_reward, reward_name, score_texts
from kleash.sampling import Rollouts

PROMPTS = ["one", "one", "two"]
RESPONSES = ["a", "bb", "ccc"]


def lengths(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    return [float(len(response)) for response in responses]


def score(reward: Callable[..., Any], **options: Any) -> list[float]:
    return score_texts(reward, PROMPTS, RESPONSES, {"answer": ["x", "y", "z"]}, **options).values.tolist()


def rollouts() -> Rollouts:
    """Two prompts of one and two ids (left-padded), responses of one to two ids."""
    return Rollouts(
        prompt_ids=torch.tensor([[0, 5], [0, 5], [7, 8]]),
        prompt_mask=torch.tensor([[False, True], [False, True], [True, True]]),
        response_ids=torch.tensor([[3, 0], [4, 2], [6, 6]]),
        response_mask=torch.tensor([[True, False], [True, True], [True, True]]),
        logp=torch.zeros(3, 2),
        ended=torch.tensor([True, True, False]),
        group=torch.tensor([0, 0, 1]),
        prompts=PROMPTS,
        responses=RESPONSES,
        columns={"answer": ["x", "x", "z"]},
    )


def test_columns_and_ids_reach_the_reward_without_padding() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, responses=responses)
        return [0.0] * len(responses)

    call_reward(reward, rollouts())
    assert seen == {
        "prompts": PROMPTS,
        "responses": RESPONSES,
        "answer": ["x", "x", "z"],
        "prompt_ids": [[5], [5], [7, 8]],
        "response_ids": [[3], [4, 2], [6, 6]],
    }


def test_report_48_the_reward_sees_the_prompt_that_produced_the_answer() -> None:
    def starts_with_its_prompt(prompts: list[str], responses: list[str]) -> list[float]:
        return [float(r.startswith(p)) for p, r in zip(prompts, responses, strict=True)]

    prompts = [str(i) for i in range(7)]
    responses = [f"{i} and so on" for i in range(7)]
    for workers in (0, 1, 2, 3, 7, 100):
        for order in (range(7), range(6, -1, -1), (3, 0, 6, 1, 5, 2, 4)):
            rows = [prompts[i] for i in order], [responses[i] for i in order]
            scores = score_texts(starts_with_its_prompt, *rows, workers=workers)
            assert scores.values.tolist() == [1.0] * 7


def test_trl_functions_get_completions_and_their_ids() -> None:
    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **kwargs: Any
    ) -> list[float]:
        assert completions == RESPONSES and kwargs["prompts"] == PROMPTS
        return [len(ids) + len(a) for ids, a in zip(completion_ids, answer, strict=True)]

    assert call_reward(reward, rollouts()).values.tolist() == [2.0, 3.0, 3.0]


def test_only_accepted_columns_are_passed() -> None:
    def needs(responses: list[str], answer: list[str]) -> list[float]:
        return [float(a == "x") for a in answer]

    assert score(needs) == [1.0, 0.0, 0.0]


def test_a_column_the_rows_lack_is_named_with_those_they_have() -> None:
    def needs(responses: list[str], solution: list[str]) -> list[float]:
        raise AssertionError("must not be called")

    with pytest.raises(
        UsageError, match=r"reward needs needs solution, .* answer, completions, prompts, responses"
    ):
        score(needs)


def test_a_function_that_does_not_take_the_responses_is_refused() -> None:
    with pytest.raises(UsageError, match="lambda does not take the responses"):
        score(lambda prompts: [0.0] * len(prompts))
    with pytest.raises(UsageError, match="needs x, y"):
        score(lambda x, y: [0.0] * len(x))


def test_missing_scores_are_nan_and_counted_never_zero() -> None:
    scores = score_texts(lambda responses: [1.0, None, 3.0], PROMPTS, RESPONSES)
    assert scores.missing == 1
    assert scores.present.tolist() == [True, False, True]
    assert scores.values[1].isnan()
    assert scores.values.dtype == torch.float32


@pytest.mark.parametrize(
    "returned",
    [
        [1, True, 0.5],
        (1, 1, 0.5),
        numpy.array([1.0, 1.0, 0.5]),
        torch.tensor([1.0, 1.0, 0.5]),
        [numpy.float32(1), numpy.int64(1), torch.tensor(0.5)],
    ],
)
def test_anything_that_is_n_numbers_is_accepted(returned: Any) -> None:
    assert score(lambda responses: returned) == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"returned None; expected a list of 3 numbers.*Does the function end without `return`"),
        (0.5, r"returned 0.5 \(a float\); expected a list of 3"),
        ("abc", r"returned 'abc'; expected a list"),
        ([1.0, 2.0], r"returned 2 values for 3 responses"),
        ([], r"returned 0 values for 3 responses"),
        ([1.0, "0.5", 1.0], r"returned '0.5' for response 2 of 3 \(prompt 'one'\); expected a number"),
        ([1.0, [2.0], 1.0], r"returned \[2.0\] \(a list\) for response 2 of 3"),
        (
            [1.0, 1.0, float("nan")],
            r"returned nan for response 3 of 3 \(prompt 'two'\); expected a finite number",
        ),
        ([float("inf"), 1.0, 1.0], r"returned inf for response 1 of 3"),
        ([1e39, 1.0, 1.0], r"returned 1e\+39 for response 1 of 3"),
    ],
)
def test_nonsense_is_named_with_its_response(returned: Any, message: str) -> None:
    def grade(responses: list[str]) -> Any:
        return returned

    with pytest.raises(RunError, match="reward grade " + message):
        score(grade)


def test_a_generator_is_not_a_list() -> None:
    def grade(responses: list[str]) -> Any:
        yield from (0.0 for _ in responses)

    with pytest.raises(RunError, match="expected a list of 3 numbers"):
        score(grade)


def test_a_reward_that_raises_names_function_line_and_error() -> None:
    def grade(responses: list[str]) -> list[float]:
        return [1 / (len(response) - 2) for response in responses]

    with pytest.raises(
        RunError, match=r"reward grade raised ZeroDivisionError: .*test_call.py, line \d+\).*responses 1 to 3"
    ):
        score(grade)
    with pytest.raises(RunError, match=r"while scoring response 2 of 3 \(prompt 'one'\)"):
        score(grade, workers=1)


def test_exit_inside_a_reward_does_not_pass_for_a_hang() -> None:
    def grade(responses: list[str]) -> list[float]:
        sys.exit("no key")

    with pytest.raises(RunError, match="grade raised SystemExit: no key"):
        score(grade, timeout=5)


def test_errors_of_the_library_pass_through_as_they_are() -> None:
    def grade(responses: list[str]) -> list[float]:
        raise UsageError("the answer column is empty")

    with pytest.raises(UsageError, match="^the answer column is empty$"):
        score(grade)


def test_report_71_a_row_that_hangs_is_missing_and_the_run_goes_on() -> None:
    release = threading.Event()

    def slow(responses: list[str]) -> list[float]:
        if "bb" in responses:
            release.wait(60)
        return [1.0] * len(responses)

    started = time.perf_counter()
    with pytest.warns(
        RuntimeWarning,
        match=r"slow did not return within 0.1 seconds: 1 responses, the first response 2 of 3",
    ):
        scores = score_texts(slow, PROMPTS, RESPONSES, timeout=0.1, workers=1)
    assert time.perf_counter() - started < 5
    assert scores.present.tolist() == [True, False, True]
    assert (scores.missing, scores.hung) == (1, 1)
    with pytest.warns(RuntimeWarning, match="3 responses"):
        assert score_texts(slow, PROMPTS, RESPONSES, timeout=0.1).missing == 3
    release.set()


def test_report_76_the_timeout_works_off_the_main_thread() -> None:
    release, found = threading.Event(), []

    def slow(responses: list[str]) -> list[float]:
        release.wait(60)
        return []

    def work() -> None:
        found.append(score_texts(slow, PROMPTS, RESPONSES, timeout=0.05).missing)

    with pytest.warns(RuntimeWarning, match="slow did not return"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
    release.set()
    assert found == [3]


def test_a_hung_call_does_not_keep_the_process_alive() -> None:
    script = """
        import time
        from kleash.rewards import score_texts
        def slow(responses):
            time.sleep(600)
        print(score_texts(slow, ["p"], ["r"], timeout=0.1).missing)
    """
    source = str(Path(kleash.__path__[0]).parent)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120, env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


class Grader:
    def __call__(self, prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        return lengths(prompts, responses)


def test_report_76_partials_objects_and_lambdas_work_and_have_names() -> None:
    partial = functools.partial(lengths, extra=1)
    method = Grader().__call__
    for reward, name in (
        (lengths, "lengths"),
        (partial, "lengths"),
        (functools.partial(partial), "lengths"),
        (Grader(), "Grader"),
        (functools.partial(Grader()), "Grader"),
        (lambda responses: [1.0, 2.0, 3.0], "lambda"),
        (method, "__call__"),
    ):
        assert reward_name(reward) == name
        scores = score_texts(reward, PROMPTS, RESPONSES)
        assert scores.values.tolist() == [1.0, 2.0, 3.0]
        assert list(scores.parts) == [name]


def test_report_58_the_logged_reward_is_the_weighted_sum_and_each_part_is_logged_alone() -> None:
    def ones(responses: list[str]) -> list[float]:
        return [1.0] * len(responses)

    def zeros(responses: list[str]) -> list[float]:
        return [0.0] * len(responses)

    scores = score_texts(load_reward({ones: 0.7, zeros: 0.3}), PROMPTS, RESPONSES)
    torch.testing.assert_close(scores.values, torch.full((3,), 0.7))
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "ones": [1.0] * 3,
        "zeros": [0.0] * 3,
    }


def test_a_sum_lacks_what_a_weighted_part_lacks_and_nothing_for_a_part_of_weight_zero() -> None:
    def some(responses: list[str]) -> list[float | None]:
        return [None, 2.0, 2.0]

    both = score_texts(load_reward({some: 1.0, lengths: 1.0}), PROMPTS, RESPONSES)
    assert both.missing == 1 and both.values[1:].tolist() == [4.0, 5.0]
    watched = score_texts(load_reward({some: 0, lengths: 1.0}), PROMPTS, RESPONSES)
    assert watched.missing == 0 and watched.values.tolist() == [1.0, 2.0, 3.0]
    assert watched.parts["some"].isnan().tolist() == [True, False, False]


def test_a_combined_reward_is_a_reward_like_any_other() -> None:
    combined = load_reward([lengths, lambda responses: [None, 1.0, 1.0]])
    assert isinstance(combined, CombinedReward)
    assert combined(prompts=PROMPTS, responses=RESPONSES) == [None, 3.0, 4.0]
    assert combined.name == "1*lengths + 1*lambda"


def test_no_gradient_is_recorded_in_a_reward() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert score(lambda responses: weight * 2) == [2.0, 2.0, 2.0]


# ---- functions written for TRL ----


def test_trl_signature_unchanged_with_metrics_extra_columns_and_the_step() -> None:
    def reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):  # type: ignore[no-untyped-def]
        assert kwargs["answer"] == ["x", "x", "z"] and "log_metric" not in kwargs
        log_metric("first", 3.0)
        log_metric("first", 5)
        log_extra("found", [len(text) for text in completions])
        return [float(trainer_state.global_step + len(ids)) for ids in completion_ids]

    scores = call_reward(reward, rollouts(), step=7)
    assert scores.values.tolist() == [8.0, 9.0, 9.0]
    assert scores.logged == {"first": (8.0, 2.0)} and scores.extra == {"found": [1, 2, 3]}
    assert Scores.join([scores, scores]).logged == {"first": (16.0, 4.0)}
    assert scores.take([2]).logged == {"first": (8.0, 2.0)}
    one_by_one = call_reward(reward_of_one(reward), rollouts(), step=7, workers=2)
    assert one_by_one.extra == {"found": [1, 2, 3]} and one_by_one.logged == {"first": (24.0, 6.0)}


def reward_of_one(reward: Callable[..., Any]) -> Callable[..., Any]:
    """The same for one response a call, whose answers differ from those of all three."""

    def one(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):  # type: ignore[no-untyped-def]
        assert len(completions) == 1
        columns = {"answer": ["x", "x", "z"]}
        return reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns)

    return one


def test_what_trl_passes_beside_columns_is_given_to_who_names_it_only() -> None:
    def defaults(completions, trainer_state=None, log_extra=None, log_metric=None, **kwargs):  # type: ignore[no-untyped-def]
        assert trainer_state.global_step == 0 and callable(log_extra) and callable(log_metric)
        return [0.0] * len(completions)

    def bare(completions, **kwargs):  # type: ignore[no-untyped-def]
        assert set(kwargs) == {"prompts", "responses", "answer"}  # lists of equal length, all of them
        return [0.0] * len(completions)

    assert score(defaults) == score(bare) == [0.0] * 3


def test_a_function_for_chats_is_told_that_completions_are_texts() -> None:
    def grade(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    with pytest.raises(RunError, match="raised TypeError.*Completions are texts here; TRL gives"):
        score(grade)
    with pytest.raises(RunError) as error:
        score(lambda responses: [len(3) for _ in responses])  # type: ignore[arg-type]
    assert "TRL" not in str(error.value)


def test_async_functions_share_a_loop_over_calls() -> None:
    loops = []

    async def judge(responses: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        lengths = await asyncio.gather(*(asyncio.sleep(0.01, len(text)) for text in responses))
        return [float(length) for length in lengths]

    assert score(judge) == [1.0, 2.0, 3.0]
    assert score(functools.partial(judge), workers=3) == [1.0, 2.0, 3.0]
    assert len(loops) == 4 and len(set(map(id, loops))) == 1


def test_an_async_function_that_raises_or_returns_nonsense_is_named() -> None:
    async def fails(responses: list[str]) -> list[float]:
        await asyncio.sleep(0)
        raise TimeoutError("the judge is asleep")

    async def short(responses: list[str]) -> list[float]:
        return [1.0]

    with pytest.raises(RunError, match=r"reward fails raised TimeoutError: the judge.*test_call.py, line"):
        score(fails)
    with pytest.raises(RunError, match="reward short returned 1 values for 3"):
        score(short)


@pytest.mark.parametrize("blocking", [False, True])
def test_an_async_function_that_hangs_is_missing_and_holds_up_nothing(blocking: bool) -> None:
    release, cancelled = threading.Event(), threading.Event()

    async def judge(responses: list[str]) -> list[float]:
        try:
            if "bb" in responses:
                release.wait(60) if blocking else await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [1.0] * len(responses)

    with pytest.warns(RuntimeWarning, match="judge did not return within 0.3 seconds: 1 responses"):
        scores = score_texts(judge, ["p"], ["bb"], timeout=0.3)
    assert (scores.missing, scores.hung) == (1, 1)
    assert score_texts(judge, PROMPTS, ["a", "b", "c"], timeout=30).values.tolist() == [1.0] * 3
    assert blocking or cancelled.wait(10)
    release.set()


# ---- one response a call, by several threads ----


def test_workers_call_at_once_and_keep_the_order() -> None:
    together = threading.Barrier(3)

    def grade(responses: list[str], answer: list[str]) -> list[float]:
        (response,), (column,) = responses, answer
        together.wait(30)  # passes only while all three are at work
        return [len(response) + "xyz".index(column) / 10]

    assert score(grade, workers=3) == pytest.approx([1.0, 2.1, 3.2])


def test_each_of_the_workers_calls_has_the_timeout_for_itself() -> None:
    release = threading.Event()

    def grade(responses: list[str]) -> list[float | None]:
        if responses == ["bb"]:
            release.wait(60)
        return [None] if responses == ["ccc"] else [float(len(responses[0]))]

    with pytest.warns(RuntimeWarning, match=r"0.5 seconds: 1 responses, the first response 2 of 3"):
        scores = score_texts(grade, PROMPTS, RESPONSES, timeout=0.5, workers=2)
    release.set()
    assert scores.present.tolist() == [True, False, False] and (scores.missing, scores.hung) == (2, 1)


def test_after_an_error_no_further_responses_are_scored() -> None:
    seen = []

    def grade(responses: list[str]) -> list[float]:
        seen.append(responses[0])
        raise ValueError("no key")

    with pytest.raises(RunError, match="raised ValueError: no key .*response 1 of 50"):
        score_texts(grade, ["p"] * 50, ["r"] * 50, workers=1)
    assert len(seen) < 50


def test_no_responses_are_no_calls() -> None:
    for workers in (0, 3):
        assert score_texts(lengths, [], [], workers=workers).values.tolist() == []


# ---- gold ----


def test_messages_name_the_option_the_function_came_from() -> None:
    def grade(responses: list[str]) -> list[float]:
        raise ValueError("no key")

    with pytest.raises(RunError, match="^gold grade raised ValueError"):
        score(grade, option="gold")
    with pytest.raises(UsageError, match="^gold lambda does not take the responses"):
        score(lambda prompts: [], option="gold")
    with pytest.raises(RunError, match="^gold lambda returned None"):
        score(lambda responses: None, option="gold")
