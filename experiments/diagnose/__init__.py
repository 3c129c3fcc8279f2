"""Why it is slow: causes inferred from rows or from a user's own numbers, by rules that are data."""
