"""Schedules of difficult chains that a test writes by hand."""

from itertools import count
from types import MappingProxyType

from lab.adversary.chains import Arrival, BlockSchedule


def schedule_of(genesis, slot_seconds, gaps=(), *, lag=0, replaced=MappingProxyType({})):
    """Blocks with these gaps, and then one in each slot; `replaced` is by number, as in `Arrival`."""

    def arrivals():
        for number in count(1):
            gap = gaps[number - 1] if number <= len(gaps) else slot_seconds
            yield Arrival(gap, lag, tuple(replaced.get(number, ())))

    return BlockSchedule(genesis, arrivals())
