"""Low-rank adapters: a few trained weights beside frozen ones. Switched off, the same model is its own
reference.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kleash.errors import UsageError
from kleash.methods.options import TrainConfig
from kleash.models import RewardModel
from kleash.models.states import causal_model


def add_adapters(policy: nn.Module, config: TrainConfig) -> nn.Module:
    """Freeze a model and give every linear layer but the output head an adapter of `lora_rank`; a reward head
    still learns. See `_check_rank` for ranks too high.
    """
    _check_rank(policy.backbone if isinstance(policy, RewardModel) else policy, config.lora_rank)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_scale,
        lora_dropout=0.0,
        target_modules="all-linear",
        bias="none",
    )
    if isinstance(policy, RewardModel):
        policy.backbone = get_peft_model(policy.backbone, lora)
        return policy
    adapted = get_peft_model(policy, lora)
    object.__setattr__(adapted, "without_adapters", lambda: AdaptersOff(adapted).eval())
    return adapted


def _check_rank(model: nn.Module, rank: int) -> None:
    """UsageError where no matrix has so high a rank, RuntimeWarning where some have not: an adapter restricts
    nothing there, and weighs as much as the matrix or more.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    highest = sorted(min(module.weight.shape) for module in linear)
    if highest and rank >= highest[-1]:
        raise UsageError(
            f"lora_rank={rank}: no matrix of this model has a rank above {highest[-1]}, so adapters would be "
            "no smaller than the weights. Choose a rank far below, such as 16, or lora_rank=0 to train every "
            "weight."
        )
    full = sum(rank >= most for most in highest)
    if full:
        warnings.warn(
            f"lora_rank={rank} restricts nothing in {full} of the {len(highest)} matrices, the smallest of "
            f"rank {highest[0]}: adapters are no smaller than the weights there.",
            RuntimeWarning,
            stacklevel=2,
        )


def merged(policy: nn.Module) -> nn.Module:
    """A copy of the policy with its adapters folded into its weights; the policy itself if it has none."""
    if isinstance(policy, RewardModel):
        if not hasattr(policy.backbone, "merge_and_unload"):
            return policy
        backbone: Any = copy.deepcopy(policy.backbone).merge_and_unload()
        return RewardModel(backbone, policy.score, policy.tokenizer, policy.meta)
    if not hasattr(policy, "merge_and_unload"):
        return policy
    copied: Any = copy.deepcopy(policy)
    return copied.merge_and_unload()


class AdaptersOff(nn.Module):
    """The model beneath the adapters, for one forward pass at a time; shares every weight with the policy.

    Offers what log-probs need of a transformers model: `base_model`, the output embeddings and the config.
    """

    def __init__(self, adapted: Any) -> None:
        super().__init__()
        self._adapted = (adapted,)  # in a tuple, so that it is no submodule: its weights belong to the policy

    @property
    def inner(self) -> Any:
        """The transformers model, adapters in place."""
        return causal_model(self._adapted[0])

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.inner.config

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self.inner.device

    @property
    def dtype(self) -> Any:
        """The dtype of its weights."""
        return self.inner.dtype

    def get_output_embeddings(self) -> nn.Module:
        """The output head, which has no adapter."""
        return self.inner.get_output_embeddings()

    def base_model(self, **inputs: Any) -> Any:
        """The backbone's forward pass with every adapter switched off."""
        with self._adapted[0].disable_adapter():
            return self.inner.base_model(**inputs)
