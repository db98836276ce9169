"""The two judges of a measurement, and what they make of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from kleash.data.items import PromptIds
from kleash.rewards import CombinedReward, ModelReward, Reward, Scores, call_reward, load_reward, reward_name
from kleash.rewards.call import TIMEOUT, accepted_columns
from kleash.sampling import Rollouts


@dataclass(frozen=True)
class Judges:
    """The reward that is optimised and the gold that is not, each loaded or None, and how they are called.

    `workers` threads call a function with one response each (0: one call with all). With
    `score_unfinished=False` a response that did not end by itself has no score.
    """

    reward: Reward | None = None
    gold: Reward | None = None
    timeout: float | None = TIMEOUT
    score_unfinished: bool = True
    workers: int = 0

    def check_columns(self, prompts: Sequence[PromptIds]) -> None:
        """UsageError where a judge needs a column that the prompts lack, before anything is sampled for
        it.
        """
        from_rows = (name for prompt in prompts for name in prompt.columns)
        columns = dict.fromkeys(("prompts", "responses", "prompt_ids", "response_ids", *from_rows))
        for option, judge in (("reward", self.reward), ("gold", self.gold)):
            if judge is None:
                continue
            parts = judge.rewards if isinstance(judge, CombinedReward) else {reward_name(judge): judge}
            for name, part in parts.items():
                accepted_columns(part, f"{option} {name}", columns)

    def scores(self, option: Literal["reward", "gold"], rollouts: Rollouts) -> Scores | None:
        """One judge's scores of the rollouts; None without a judge."""
        judge: Reward | None = getattr(self, option)
        if judge is None:
            return None
        scores = call_reward(judge, rollouts, self.timeout, self.workers, option)
        if not self.score_unfinished:
            for values in (scores.values, *scores.parts.values()):
                values[~rollouts.ended] = torch.nan
            scores.missing = int(scores.values.isnan().sum())
        return scores


def load_judge(
    spec: Any, tokenizer: PreTrainedTokenizerBase, *, standardise: bool = True, option: str = "reward"
) -> Reward | None:
    """A reward from the value of an option (reward or gold), None for None; UsageError where a reward model
    cannot read the policy's ids.
    """
    if spec is None:
        return None
    judge = load_reward(spec, standardise=standardise, option=option)
    for part in judge.rewards.values() if isinstance(judge, CombinedReward) else [judge]:
        if isinstance(part, ModelReward):
            part.check_tokenizer(tokenizer)
    return judge
