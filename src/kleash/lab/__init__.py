"""The lab: RLHF end to end on the bundled model, judged by a hidden rule that no model is shown."""
