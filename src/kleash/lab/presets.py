"""How much of the lab is run: sizes that differ between presets, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from kleash.errors import UsageError

BETA = 0.05  # the KL coefficient of the run with the penalty, and of DPO
SWEEP = (0.0, 0.02, 0.05, 0.2, 1.0)  # seed 004's stretch: five values, one seed
RESPONSE_TOKENS = 24


@dataclass(frozen=True)
class Preset:
    """Sizes of one way to run the lab.

    openings: training and evaluation openings used, of 64 each. responses: sampled to each training
    opening; pairs: drawn from them, per opening, before ties are dropped. policy_steps, policy_batch,
    policy_rate: of both REINFORCE runs. eval_samples: responses to each evaluation opening. judged: whether
    the checkpoints are checked. sweep: whether the beta sweep is run.
    """

    name: str
    openings: int = 64
    responses: int = 20
    pairs: int = 22
    reward_epochs: float = 2.0
    reward_rate: float = 1e-4
    policy_steps: int = 40
    policy_batch: int = 32
    policy_rate: float = 1e-4
    dpo_epochs: float = 1.0
    dpo_rate: float = 8e-5
    eval_samples: int = 4
    response_tokens: int = RESPONSE_TOKENS
    judged: bool = True
    sweep: bool = False

    @property
    def skipped(self) -> list[str]:
        """What a reader of the report should know was left out."""
        left_out = []
        if not self.judged:
            left_out.append(
                "the checkpoints: training is too short for reward hacking to show, so none is judged"
            )
        if not self.sweep:
            left_out.append("the beta sweep (kleash lab --preset full runs it)")
        return left_out


PRESETS = {
    "tiny": Preset(
        "tiny",
        openings=8,
        responses=6,
        pairs=6,
        policy_steps=3,
        policy_batch=8,
        eval_samples=2,
        response_tokens=12,
        judged=False,
    ),
    "quick": Preset(
        "quick", responses=10, pairs=10, reward_epochs=1.0, policy_steps=12, eval_samples=2, judged=False
    ),
    "standard": Preset("standard"),
    "full": Preset("full", sweep=True),
}


def find_preset(name: str) -> Preset:
    """The preset of that name; UsageError lists those there are."""
    if name not in PRESETS:
        raise UsageError(f"preset={name}: there is no such preset. Choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]
