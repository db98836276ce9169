"""Randomly initialised tiny models of many families, to compare a fast path with the plain one."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
COMMON = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
LLAMA = COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
GPT2 = COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FAMILIES: dict[str, dict[str, object]] = {
    "gpt2": GPT2,
    "gpt_neox": {k: v for k, v in LLAMA.items() if k not in {"num_key_value_heads", "head_dim"}}
    | {"rotary_pct": 0.5},
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 5},
    "qwen2": LLAMA | {"use_sliding_window": False},
    "qwen3": LLAMA,
    "qwen3_moe": LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gemma": LLAMA,
    "gemma2": LLAMA
    | {
        "sliding_window": 4,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": LLAMA
    | {
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi": {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"partial_rotary_factor": 0.5},
    "phi3": {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"partial_rotary_factor": 0.5},
    "olmo": {k: v for k, v in LLAMA.items() if k != "head_dim"},
    "olmo2": LLAMA,
    "smollm3": LLAMA | {"no_rope_layers": [1, 0]},
    "starcoder2": {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"sliding_window": None},
    "granite": LLAMA | {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    "cohere": LLAMA | {"logit_scale": 0.25},
    "falcon": COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def tiny(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model of the family in float32, evaluation mode, weights spread enough for its outputs to
    vary.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(FAMILIES[family] | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model.float().eval()
