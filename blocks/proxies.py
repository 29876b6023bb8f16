"""Exceptions from the environment's proxies: the loopback interface is one, in every process of a neuron."""

import ipaddress
import re
from collections.abc import Mapping

from templar.errors import PermanentError, Reason
from templar.store.s3_protocol import is_loopback, require_proxies

NO_PROXY = ("NO_PROXY", "no_proxy")
_ENTRY = re.compile(r"[ -9;-Z^-~]*(:\d*)?(/\d+)?")
_LOOPBACK = ("127.0.0.1", "localhost")


def exempting_loopback(environment: Mapping[str, str], host: str | None = None) -> dict[str, str]:
    """`NO_PROXY`, in both its forms, that has the loopback interface besides what it had.

    `host` is another name or address of the loopback interface; any other host is not added. `bad_environment` names a
    variable that the HTTP clients cannot use.
    """
    require_proxies(environment)
    entries = [(name, entry.strip()) for name in NO_PROXY for entry in environment.get(name, "").split(",")]
    for name, entry in entries:
        if not _is_exception(entry):
            raise PermanentError(
                Reason.BAD_ENVIRONMENT,
                f"{name} has {ascii(entry)[:80]}, which the HTTP clients cannot read: remove it there; they take names "
                "of hosts, addresses, and ranges of IPv4",
            )
    hosts = [entry for _, entry in entries if entry]
    added = [*_LOOPBACK, host] if host and is_loopback(host) else _LOOPBACK
    text = "*" if "*" in hosts else ",".join(dict.fromkeys([*hosts, *added]))  # only alone does a star mean all hosts
    return dict.fromkeys(NO_PROXY, text)


def _is_exception(entry: str) -> bool:
    """Whether httpx can read an entry of `NO_PROXY`; it fails on a range of IPv6."""
    try:
        ipaddress.IPv6Address(entry)
    except ValueError:
        return _ENTRY.fullmatch(entry.partition("://")[2] if "://" in entry else entry) is not None
    return True
