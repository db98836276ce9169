"""Files and hub data sets -> rows -> tokens with masks -> typed batches."""

from kleash.data.batches import Batch, collate_examples, collate_pairs, plan_epoch
from kleash.data.items import Example, Pair, PromptIds

__all__ = ["Batch", "Example", "Pair", "PromptIds", "collate_examples", "collate_pairs", "plan_epoch"]
