"""Counts of a process, from many threads."""

from concurrent.futures import ThreadPoolExecutor

from templar.errors import Reason
from templar.traffic import Traffic


def test_counts_of_many_threads_add_up():
    traffic = Traffic()

    def count(number):
        for _ in range(1000):
            traffic.count_sent(2)
            traffic.count_fetched(3)
            traffic.count_retry(f"bucket-{number % 2}", Reason.STORE_BUSY)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(count, range(8)))
    assert (traffic.sent_bytes, traffic.fetched_bytes) == (16_000, 24_000)
    assert traffic.retries() == {(f"bucket-{number}", "store_busy"): 4000 for number in range(2)}
