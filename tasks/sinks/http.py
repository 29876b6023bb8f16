"""A server that takes items by HTTP POST."""

from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx

from tasks.sinks.sending import UnacceptableError
from templar.store.s3_protocol import is_loopback

TIMEOUT_SECONDS = 10.0
_ITEMS_ARE_WRONG = frozenset({400, 413, 422})
"""Answers that say that the same items would be refused again; all others may be different later."""


class HttpTarget:
    """Posts to one server."""

    def __init__(self, url: str, headers: Mapping[str, str], auth: httpx.BasicAuth | None = None) -> None:
        trusts = not is_loopback(urlsplit(url).hostname)  # nothing there is behind a proxy
        self._client = httpx.Client(
            base_url=url, headers=dict(headers), auth=auth, timeout=TIMEOUT_SECONDS, trust_env=trusts
        )

    def post(
        self, path: str, body: bytes, *, query: Mapping[str, str] | None = None, kind: str = "text/plain"
    ) -> bytes:
        """Post a body; the answer's body.

        Raises:
            UnacceptableError: The server will never take these items.
            httpx.HTTPError: It does not take them now.
        """
        answer = self._client.post(path, content=body, params=dict(query or {}), headers={"Content-Type": kind})
        if answer.status_code in _ITEMS_ARE_WRONG:
            raise UnacceptableError(f"{answer.status_code}: {answer.text[:200]!r}")
        answer.raise_for_status()
        return answer.content

    def close(self) -> None:
        """Close connections."""
        self._client.close()
