"""Rosters, evidence and proofs held against public objects."""
