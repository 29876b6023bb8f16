"""Signed objects, commit and reveal, gather: what nodes publish for each other and when it counts."""
