"""Options that a method refuses for what they mean together or at their edge, each by name."""

from __future__ import annotations

import pytest

from kleash.config import build
from kleash.errors import UsageError
from kleash.methods import METHODS
from kleash.training.watch import PATIENCE, Watch


def test_half_of_the_labels_wrong_is_refused_by_name() -> None:
    dpo = METHODS["dpo"].config
    assert build(dpo, {"data": "x", "label_smoothing": 0.49}).label_smoothing == 0.49
    with pytest.raises(UsageError, match="label_smoothing=0.5"):
        build(dpo, {"data": "x", "label_smoothing": 0.5})


@pytest.mark.parametrize("longest", [62, 63, 64, 65])
def test_room_for_a_prompt_is_counted_in_what_the_user_gave(longest: int) -> None:
    options = {"data": "x", "reward": "length:200", "max_length": 64, "max_new_tokens": longest}
    reinforce = METHODS["reinforce"].config
    if longest == 62:
        assert build(reinforce, options).max_new_tokens == 62
        return
    with pytest.raises(UsageError, match=rf"max_length=64 leaves no room .*max_new_tokens={longest}: raise"):
        build(reinforce, options)


def test_reward_says_whose_text_it_takes_the_responses_to_be() -> None:
    method = METHODS["reward"]
    assert "text_model=unknown" in method.notes(build(method.config, {"data": "x"}))[0]
    assert method.notes(build(method.config, {"data": "x", "text_model": "unknown"})) == []


@pytest.mark.parametrize(("value", "warned"), [(-1e-4, False), (-0.2, True)])
def test_falling_chosen_responses_are_said_once_and_not_for_rounding(value: float, warned: bool) -> None:
    watch = Watch()
    for step in range(2 * PATIENCE):
        watch.see({"step": step, "dpo/reward_chosen": value})
    assert len(watch.warnings) == int(warned)
