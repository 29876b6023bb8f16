"""The flows that an operator starts and schedules, one per file."""
