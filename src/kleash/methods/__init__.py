"""The table of methods: one entry, one file. Nothing else in the library lists them."""

from kleash.methods import dpo, group, ppo, reinforce, reward, sft
from kleash.methods.base import Method
from kleash.methods.options import TrainConfig

METHODS: dict[str, Method] = {
    m.name: m for m in (sft.METHOD, reward.METHOD, reinforce.METHOD, ppo.METHOD, *group.METHODS, dpo.METHOD)
}

__all__ = ["METHODS", "Method", "TrainConfig"]
