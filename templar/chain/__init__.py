"""Chains: one contract, a ledger for one machine and Bittensor."""
