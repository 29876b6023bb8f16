"""Prefect blocks: typed settings and secrets that build stores, chains and wallets."""
