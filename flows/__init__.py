"""The flows that an operator sees: one per file, each reads like the description of what it does."""
