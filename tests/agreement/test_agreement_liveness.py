"""No minority stops a network of seven validators: some are dead, or have buckets that fail."""

import pytest

from lab.simulate.fault_plan import Fault, FaultKind, FaultPlan
from lab.simulate.faulty_network import FaultyNetwork, fault_hparams
from templar.shared_results import sharing
from tests.support.network import tiny

SEVEN, WINDOWS = 7, 5
NAMES = ("killed", "down", "forbidden", "busy", "hanging")
QUICK = {("killed", 1, 1 / 2), ("forbidden", 3, 1 / 2), ("busy", 2, 2 / 3)}


@pytest.mark.parametrize(
    ("name", "number", "share"),
    [
        pytest.param(name, number, share, marks=[] if (name, number, share) in QUICK else [pytest.mark.long])
        for name in NAMES
        for number in (1, 2, 3)
        for share in (1 / 2, 2 / 3)
    ],
)
def test_a_minority_stops_nobody(tmp_path, name, number, share):
    """The first validators have as much stake together as the quorum lets be missing, and a fault once it has begun.

    The faulty network checks that the others apply every window before the next one closes, to one root.
    """
    missing, others = (1 - share) * 990.0, SEVEN - number
    stakes = [missing / number] * number + [(1000.0 - missing) / others] * others
    kind = FaultKind.PROCESS if name == "killed" else FaultKind.BUCKET
    faults = tuple(Fault(uid, kind, name, 2, WINDOWS) for uid in range(1, number + 1))
    plan = FaultPlan(
        1, WINDOWS, SEVEN - 1, ("honest", "honest"), is_difficult=False, faults=faults, stakes=(tuple(stakes),)
    )
    times = fault_hparams().windows.model_dump()  # a slot of two seconds is over when one bucket has hung
    network = FaultyNetwork(plan, tmp_path, tiny("simulation", windows=times | {"quorum": share}))
    with sharing():
        network.run()
    assert network.roots.keys() == {*range(1, WINDOWS + 1)}
    for node in network.nodes.values():
        node.stop()
