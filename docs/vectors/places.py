"""Vectors of window times and of bucket commitments."""

from typing import Any

from docs.vectors.scenario import RULES, TIMES, WINDOW
from templar.chain.base import Role
from templar.chain.extrinsics import role_record
from templar.store.address import BucketAddress, encode_address
from templar.timeline import WindowTimes


def time_vectors() -> dict[str, Any]:
    """The intervals of a window, for chain times with and without fractions of a second."""
    cases = (TIMES, WindowTimes(WINDOW + 1, opened=1_700_000_036.0, closed=1_700_000_054.0, rules=RULES))
    return {"rules": RULES.model_dump(), "windows": [_times(each) for each in cases]}


def commitment_vectors() -> dict[str, Any]:
    """Return what a hotkey commits on chain about its bucket, and the axon records that announce roles."""
    addresses = (
        BucketAddress("0123456789abcdef" * 2, "fedcba9876543210" * 2, "00112233445566778899aabbccddeeff" * 2),
        BucketAddress("local-bucket", "readkey", "secret/with+base64="),
    )
    commitments = [
        {
            "account_id": address.account_id,
            "access_key_id": address.access_key_id,
            "secret_access_key": address.secret_access_key,
            "commitment": encode_address(address),
        }
        for address in addresses
    ]
    roles = {role.value: role_record(role) for role in Role}
    others = [
        roles["miner"] | changes
        for changes in ({"placeholder2": 3}, {"placeholder1": 0}, {"ip": 2130706433}, {"port": 8091})
    ]
    return {"buckets": commitments, "roles": roles, "no_roles": others}


def _times(times: WindowTimes) -> dict[str, Any]:
    commit, reveal = times.commit_interval, times.reveal_interval
    slots = [times.roster_slot(rank) for rank in range(times.rules.roster_ranks)]
    return {
        "window": times.window,
        "opened": times.opened,
        "closed": times.closed,
        "close": times.close,
        "commit": [commit.first, commit.last],
        "reveal": [reveal.first, reveal.last],
        "settles": times.settles,
        "roster_slots": [[slot.first, slot.last] for slot in slots],
        "null_after": times.null_after,
        "train_until": times.train_until,
    }
