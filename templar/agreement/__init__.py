"""Rosters, decisions and the state that follows from them: what all nodes agree on."""
