"""Low-rank adapters: a few trained weights beside frozen ones. Switched off, the same model is its own
reference.
"""

from __future__ import annotations

import copy
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import nn

from kleash.methods.options import TrainConfig
from kleash.models import RewardModel
from kleash.models.states import causal_model


def add_adapters(policy: nn.Module, config: TrainConfig) -> nn.Module:
    """Freeze a model and give every linear layer but the output head an adapter of `lora_rank`; a reward head
    still learns.
    """
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
