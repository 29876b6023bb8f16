"""Storage and time of a network on a real S3 endpoint: one account per member, and the machine's own clock."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial

from deployments.s3_endpoint import AccessKey, BucketKeys
from lab.gauntlet.endpoints import Endpoint
from lab.gauntlet.gate import Gates
from lab.simulate.world import Member
from templar import interrupt
from templar.chain.clock import SystemClock
from templar.store.address import BucketAddress
from templar.store.base import ObjectStore
from templar.store.s3 import S3Store
from templar.store.s3_protocol import S3Settings

SOMEBODY = "somebody"  # the gate of readers that are no member: the preparation of the network, and its judge


class S3Stage:
    """A stage on an S3 endpoint, in real time; implements `lab.simulate.world.Stage`.

    Block 0 is `genesis_seconds_ago` old, so that the first window opens soon.
    """

    gather_concurrency = 8  # as in production, so that one slow bucket does not hold up the others

    def __init__(
        self, endpoint: Endpoint, gates: Gates, settings: S3Settings, *, genesis_seconds_ago: float = 0.0
    ) -> None:
        self._endpoint = endpoint
        self._gates = gates
        self._settings = settings
        self.clock = SystemClock()
        self._keys: dict[str, BucketKeys] = {}
        self.genesis_time = float(int(time.time() - genesis_seconds_ago))

    def open_store(self, bucket: str) -> ObjectStore:
        """A bucket with write rights; the first call creates it."""
        return self._open(bucket, self._keys_of(bucket).write, self._gates.url(bucket, writes=True))

    def open_reader(self, address: BucketAddress) -> ObjectStore:
        """A bucket as a reader sees it that is no member."""
        return self.open_reader_of(SOMEBODY, address)

    def open_reader_of(self, who: str, address: BucketAddress) -> ObjectStore:
        """A bucket at the address that its owner committed on chain, as the account `who` sees it: at its gate."""
        key = AccessKey(address.access_key_id, address.secret_access_key)
        return self._open(address.account_id, key, self._gates.url(who, writes=False))

    def address_of(self, member: Member) -> BucketAddress:
        """The member's account, and the key that may only read."""
        read = self._keys_of(member.account_id).read
        return BucketAddress(member.account_id, read.access_key_id, read.secret_access_key)

    def write_key(self, member: Member) -> AccessKey:
        """The key that never leaves a member."""
        return self._keys_of(member.account_id).write

    def run(self, participants: Sequence[Callable[[], None]]) -> None:
        """Run participants in threads with this thread's context; the first failure asks the others to stop."""
        with ThreadPoolExecutor(max_workers=max(1, len(participants)), thread_name_prefix="node") as pool:
            futures = [pool.submit(partial(copy_context().run, participant)) for participant in participants]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failures = [failure for future in done if (failure := future.exception()) is not None]
            if failures:
                interrupt.request_stop()
        if failures:
            raise failures[0]

    def _keys_of(self, bucket: str) -> BucketKeys:
        if bucket not in self._keys:
            self._keys[bucket] = self._endpoint.make(bucket)
        return self._keys[bucket]

    def _open(self, bucket: str, key: AccessKey, url: str) -> ObjectStore:
        return S3Store(
            bucket,
            endpoint_url=url,
            access_key_id=key.access_key_id,
            secret_access_key=key.secret_access_key,
            settings=self._settings,
        )
