"""Formats of the public framework templar, read for comparison."""
