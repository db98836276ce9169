"""Files and hub data sets -> rows -> tokens with masks -> typed batches."""

from kleash.data.batches import Batch, collate_examples, collate_pairs, plan_epoch
from kleash.data.items import Example, Pair, PromptIds
from kleash.data.render import render_tokens
from kleash.data.sources import Rows, pairs_from_ranked, read_rows, split_rows
from kleash.data.tokenise import (
    Tokenised,
    pad_id,
    tokenise_demonstrations,
    tokenise_preferences,
    tokenise_prompts,
)

__all__ = [
    "Batch",
    "Example",
    "Pair",
    "PromptIds",
    "Rows",
    "Tokenised",
    "collate_examples",
    "collate_pairs",
    "pad_id",
    "pairs_from_ranked",
    "plan_epoch",
    "read_rows",
    "render_tokens",
    "split_rows",
    "tokenise_demonstrations",
    "tokenise_preferences",
    "tokenise_prompts",
]
