"""A trained reward model as a reward: it reads the ids that were sampled, never text decoded and encoded
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kleash.data.batches import Batch, collate_examples
from kleash.data.items import Example
from kleash.errors import UsageError
from kleash.models import RewardModel, autocast
from kleash.models.forward import Dtype


class ModelReward:
    """Scores of a RewardModel, float32, in the order given.

    With `standardise` they are (score − mean) / std of the model's held-out scores, so that `beta` means the
    same for every reward model. `dtype` is that of the matrix products, `rows` how many responses a forward
    pass holds, `option` the one it was given in, for messages.
    """

    def __init__(
        self,
        model: RewardModel,
        *,
        name: str = "reward_model",
        standardise: bool = False,
        dtype: Dtype = "auto",
        rows: int = 64,
        option: str = "reward",
    ) -> None:
        self.model, self.name, self.dtype, self.rows = model.eval(), name, dtype, rows
        self.option = option
        self.mean, self.std = self._scale() if standardise else (0.0, 1.0)

    @classmethod
    def load(cls, source: str | Path, **options: Any) -> ModelReward:
        """From a reward model folder, a run folder or a hub id; named after the folder."""
        return cls(RewardModel.load(source), **{"name": Path(source).name or str(source), **options})

    def _scale(self) -> tuple[float, float]:
        mean, std = self.model.meta.get("mean"), self.model.meta.get("std")
        if mean is None or std is None or not std > 0:
            raise UsageError(
                f"{self.option} {self.name}: it cannot be standardised, because its record holds mean={mean} "
                f"and std={std} of its held-out scores. Train it with `kleash train reward`, which stores "
                "both, or give standardise_reward=false for its raw scores."
            )
        return float(mean), float(std)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """UsageError unless the policy's ids mean the same to this model."""
        if tokenizer.get_vocab() != self.model.tokenizer.get_vocab():
            raise UsageError(
                f"{self.option} {self.name}: its vocabulary ({len(self.model.tokenizer)} tokens) is not the "
                f"policy's ({len(tokenizer)} tokens), so it cannot read the ids the policy samples. Train a "
                "reward model on this policy's own base model."
            )

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        *,
        prompt_ids: Sequence[Sequence[int]],
        response_ids: Sequence[Sequence[int]],
    ) -> list[float | None]:
        """One score a response, at its last real token; the texts are not read."""
        device = self.model.score.weight.device
        scores: list[float | None] = []
        with autocast(self.dtype, device.type):
            for batch in row_batches(prompt_ids, response_ids, self.rows):
                raw = self.model.scores(batch.to(device)).float().cpu()
                scores += ((raw - self.mean) / self.std).tolist()
        return scores


def row_batches(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], rows: int
) -> list[Batch]:
    """Batches of at most `rows` rows, in order; where every prompt has k > 1 responses in a row, its prefix
    is shared.
    """
    examples = [
        Example(list(prompt), list(response), [True] * len(response), number)
        for number, (prompt, response) in enumerate(zip(prompt_ids, response_ids, strict=True), start=1)
    ]
    runs = [len(list(run)) for _, run in groupby(examples, key=lambda example: example.prompt_ids)]
    size = runs[0] if runs and len(set(runs)) == 1 and runs[0] <= rows else 1
    step = rows // size * size
    batches = []
    for start in range(0, len(examples), step):
        chunk = examples[start : start + step]
        batch = collate_examples(chunk, pad_id=0)
        if size > 1:
            batch.group_size = size
            batch.shared_prefix = torch.tensor([len(example.prompt_ids) for example in chunk[::size]])
        batches.append(batch)
    return batches
