"""A reward model: the same transformer with a scalar head, read at each row's last real token."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from kleash.data.batches import Batch
from kleash.errors import UsageError
from kleash.models.attention import use_grouped_attention
from kleash.models.forward import last_token_states
from kleash.models.load import load_tokenizer, load_weights, resolve_source
from kleash.models.states import causal_model

HEAD = "score.weight"
META = "reward_model.json"


class RewardModel(nn.Module):
    """r_φ(x, y): one number for a whole response.

    `meta` records where the number can be trusted: `text_model`, the identity of the model that wrote the
    training responses, and `mean` and `std` of the scores on held-out responses of that model. Saved in
    transformers' own sequence-classification layout (one label), so `AutoModelForSequenceClassification`
    loads it where it knows the family.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        head: nn.Linear,
        tokenizer: PreTrainedTokenizerBase,
        meta: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.score, self.tokenizer = backbone, head, tokenizer
        self.meta: dict[str, Any] = dict(meta or {})

    @classmethod
    def from_policy(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> RewardModel:
        """A fresh reward model on a copy of the policy's backbone; the head starts at zero, so the first
        loss is ln 2.
        """
        backbone = copy.deepcopy(causal_model(model).base_model)
        for parameter in backbone.parameters():
            parameter.requires_grad_(True)
        head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(head.weight)
        return cls(use_grouped_attention(backbone), head.to(backbone.device), tokenizer)

    def scores(self, batch: Batch) -> Tensor:
        """Scores (N,) in float32, read at each row's last real token wherever the padding is; gradients
        flow.
        """
        states = last_token_states(self.backbone, batch).float()
        with torch.autocast(states.device.type, enabled=False):  # one dot product a row: keep it in float32
            return self.score(states)[:, 0]

    forward = scores

    def save(self, path: str | Path) -> Path:
        """Write the model with its head, its tokenizer and its record into a folder."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        prefix = self.backbone.base_model_prefix
        tensors = {
            f"{prefix}.{name}": tensor.contiguous() for name, tensor in self.backbone.state_dict().items()
        }
        tensors[HEAD] = self.score.weight.detach().contiguous()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self.backbone.config)
        config.architectures = [
            type(self.backbone).__name__.removesuffix("Model") + "ForSequenceClassification"
        ]
        config.num_labels = 1
        if config.get_text_config().pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id
        config.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        (path / META).write_text(json.dumps(self.meta, indent=2), encoding="utf-8")
        return path

    @classmethod
    def load(cls, source: str | Path) -> RewardModel:
        """Load a reward model folder, run folder or hub id; a model without a scalar head raises
        UsageError.
        """
        where = resolve_source(source)
        if not Path(where).is_dir():
            where = _from_hub(where)
        weight = _head_weight(Path(where))
        backbone = load_weights(AutoModel, where)
        head = nn.Linear(weight.shape[1], 1, bias=False)
        head.weight.data.copy_(weight)
        record = Path(where) / META
        meta = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        return cls(use_grouped_attention(backbone), head, load_tokenizer(where), meta).eval()


def _from_hub(name: str) -> str:
    """The folder of a hub repository's files, fetched; UsageError where there is none or no hub."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"])
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UsageError(
            f"reward: there is no folder {name} (looked from {Path.cwd()}), and it cannot be fetched from "
            f"the hub: {reason}. Expected the folder of a reward model or of its run, a hub id, "
            "file.py:function, or a rule such as length:200."
        ) from error


def _head_weight(path: Path) -> Tensor:
    """The (1, H) weight of the scalar head in a folder's safetensors files."""
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if HEAD in tensors.keys():  # noqa: SIM118  (safe_open objects are not containers)
                weight = tensors.get_tensor(HEAD).float()
                if weight.shape[0] != 1:
                    raise UsageError(
                        f"reward: {path} is a classifier with {weight.shape[0]} labels, not a reward "
                        f"model with one score."
                    )
                return weight
    raise UsageError(
        f"reward: {path} holds no scalar head ({HEAD} is missing from its safetensors), so it is not a "
        f"reward model. "
        "Train one with `kleash train reward`, or give a sequence-classification model with one label."
    )
