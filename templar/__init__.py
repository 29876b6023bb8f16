"""Permissionless training of one language model by strangers.

The domain: windows, gradients, stores, chains, the exchange, scoring and the live state of a node.
Nothing in this package knows Prefect; `flows/` and `tasks/` tell its story to the operator.
"""

PROTOCOL_VERSION = "10"
"""Version of the wire formats and rules; part of every object key. It is not the release's version."""
RELEASE = "0.1.0"
"""Version of the release, as pip and CHANGELOG.md name it."""
