"""Every bad actor meets the rule that is made for it, and everybody else goes on as one."""

import pytest
import torch

from lab.adversary.cheats import SignFlipMiner
from templar.agreement.ballot_box import decided_roster
from templar.errors import Reason
from templar.scoring.standing import Event, ScoreCard
from templar.shared_results import sharing
from tests.support.network import Network, tiny

ROLES = ["honest", "honest", "honest", "lazy", "silent", "late", "garbage", "huge"]
"""Those of whom the scores say something; `tests/adversary` has the others."""
WINDOWS = 6


@pytest.fixture(scope="module", params=["local", pytest.param("local-demo", marks=pytest.mark.slow)])
def network(request, build_shared):
    """Six windows of a network with one of each kind and three honest miners, all of them gathered."""
    peers = {"gather_peer_count": 8, "peer_replacement_frequency": 100}
    return build_shared(tiny(request.param, peers=peers), actors=ROLES, windows=range(1, WINDOWS + 1))


def records(network, role, window):
    uids = {member.uid for member in network.members if member.role == role}
    return [record for record in network.evidence(window).miners if record.uid in uids]


def weight(network, role):
    uids = [member.uid for member in network.members if member.role == role]
    weights = network.world.chain.weights()[network.validator.exchange.identity(WINDOWS).uid]
    return [weights.get(uid, 0.0) for uid in uids]


def test_every_honest_node_is_on_one_root_and_the_loss_falls(network):
    assert len(network.roots(WINDOWS)) == 1
    assert network.validator.state.outer_steps == WINDOWS
    first, last = (network.evidence(window).loss for window in (1, WINDOWS))
    assert last < first


@pytest.mark.parametrize(
    ("role", "reason", "event"),
    [
        ("silent", Reason.MANIFEST_MISSING, Event.MISSING),
        ("late", Reason.REVEAL_LATE, Event.MISSING),
        ("garbage", Reason.MALFORMED, Event.INVALID),
    ],
)
def test_what_does_not_count_earns_its_reason_in_every_window(network, role, reason, event):
    for window in range(1, WINDOWS + 1):
        (record,) = records(network, role, window)
        assert (record.facts.reason, record.facts.payload_sha256, record.facts.estimate) == (reason, None, None)
        assert [(slash.event, slash.reason) for slash in record.slashes] == [(event, reason)]
        assert record.final == 0
    assert weight(network, role) == [0.0]


def test_only_payloads_that_count_are_applied(network):
    good = sorted(member.uid for member in network.members if member.role in ("honest", "lazy", "huge"))
    for window in range(1, WINDOWS + 1):
        roster, _ = decided_roster(network.validator.exchange, window)
        assert [entry.uid for entry in roster.entries] == good


def test_noise_is_rated_below_every_honest_miner_and_earns_nothing(network):
    """Of few windows, the average of noise can be a little above nothing: then it earns next to nothing."""
    for window in range(4, WINDOWS + 1):
        (lazy,) = records(network, "lazy", window)
        assert lazy.facts.reason is None
        for honest in records(network, "honest", window):
            assert lazy.gradient_score < honest.gradient_score
            assert lazy.after.mu < honest.after.mu
            assert lazy.final < 0.1 * honest.final
        assert lazy.final < 1e-3
    assert weight(network, "lazy") == [0.0]
    assert sum(each > 0 for each in weight(network, "honest")) >= 2  # ratings are relative: the last of three may wait


def test_a_huge_update_is_accepted_weighs_no_more_than_another_and_is_slashed(network):
    """It is clipped to the median norm (or to the unit norm), so the model stays as sound as without it."""
    for window in range(1, WINDOWS + 1):
        (huge,) = records(network, "huge", window)
        assert huge.facts.reason is None
        assert [slash.event for slash in huge.slashes] == [Event.OVERSIZED]
        assert huge.final <= 0
        best = max(record.gradient_score or 0.0 for record in records(network, "honest", window))
        assert abs(huge.gradient_score) < 5 * best + 1e-3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in network.validator.state.params.values())


HONEST_WINDOWS = range(6, 10)
BETRAYED_WINDOWS = 14


class Turncoat(SignFlipMiner):
    """Flips the sign of its update, but for some windows."""

    def learn(self, window, sequences, keep_going):
        """An honest update, or its negative."""
        self.__dict__["factor"] = 1.0 if window in HONEST_WINDOWS else -1.0
        return super().learn(window, sequences, keep_going)


@pytest.fixture(scope="module")
def betrayed(tmp_path_factory):
    """The peers are listed anew in each window, and averages forget half of the past in a window."""
    peers = {"gather_peer_count": 8, "peer_replacement_frequency": 1}
    scoring = {"binary_score_ma_alpha": 0.5, "exclusion_after": 2.0, "exclusion_windows": 3}
    actors, kinds = ["honest"] * 3 + ["sign_flip"], {"sign_flip": Turncoat}
    folder = tmp_path_factory.mktemp("betrayed")
    with sharing():
        network = Network(folder, tiny(peers=peers, scoring=scoring), actors=actors, kinds=kinds)
        network.run(range(1, BETRAYED_WINDOWS + 1))
    yield network
    network.stop()


def test_a_miner_that_earns_nothing_loses_its_place_and_returns_when_it_works(betrayed):
    """It is measured in every window, in its place or not; after the second time it is away for twice as long."""
    (traitor,) = (member for member in betrayed.members if member.role == "sign_flip")
    cards: dict[int, ScoreCard] = {}
    listed: dict[int, bool] = {}
    for window in range(1, BETRAYED_WINDOWS + 1):
        (record,) = records(betrayed, "sign_flip", window)
        assert record.facts.estimate is not None
        cards[window] = record.after
        roster, _ = decided_roster(betrayed.validator.exchange, window)
        listed[window] = traitor.uid in {entry.uid for entry in roster.entries}
        assert listed[window] == record.facts.applied == (record.facts.tier == "gather")
    first = next(window for window, card in cards.items() if card.exclusions == 1)
    back = next(window for window, card in cards.items() if window > first and card.excluded_until is None)
    second = next(window for window, card in cards.items() if card.exclusions == 2)
    assert cards[first].excluded_until == first + 3
    assert back >= first + 3
    assert back in HONEST_WINDOWS
    assert cards[second].excluded_until == second + 6
    away = {window for window, is_listed in listed.items() if not is_listed}
    assert away == {*range(first + 2, back + 2), *range(second + 2, BETRAYED_WINDOWS + 1)}


def test_no_honest_miner_loses_its_place(betrayed):
    for window in range(1, BETRAYED_WINDOWS + 1):
        for record in records(betrayed, "honest", window):
            assert (record.after.exclusions, record.facts.applied) == (0, True)
    assert len(betrayed.roots(BETRAYED_WINDOWS)) == 1
