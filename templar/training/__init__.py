"""The language model, its loss and schedule, and the two training recipes."""
