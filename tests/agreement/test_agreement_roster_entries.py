import pytest

from templar.agreement.roster import check_entries
from templar.errors import Reason, RejectedError
from templar.exchange.objects import Roster
from templar.exchange.reveal import RevealRules, Submission
from templar.exchange.signed import check_signature, seal
from templar.timeline import WindowTimes
from tests.support.subnet import (
    ASSIGNMENT,
    NETWORK,
    Subnet,
    manifest_of,
    payload_bytes,
    submission_of,
)

WINDOW = 3


class Scene:
    """A roster of three miners, and the rules that it must meet."""

    def __init__(self, folder):
        self.subnet = Subnet(folder, num_miners=4)
        self.times: WindowTimes = self.subnet.times(WINDOW)
        self.miners = self.subnet.miners[:3]

    def entry(self, author, **manifest):
        signed = manifest_of(author, WINDOW, payload_bytes(author, WINDOW), **manifest)
        at = self.times.commit_interval.last, self.times.reveal_interval.first
        return submission_of(author, signed, *at).entry

    def roster(self, *entries):
        publisher = self.subnet.validators[0]
        listed = entries or tuple(self.entry(author) for author in self.miners)
        return Roster(
            **publisher.signing,
            window=WINDOW,
            previous=None,
            peer_list=None,
            entries=listed,
            aggregate_sha256="ab" * 32,
            aggregate_bytes=sum(entry.payload_bytes for entry in listed),
        )

    def check(self, roster, places=3, assignment=ASSIGNMENT):
        rules = RevealRules(NETWORK, self.times, lambda uid: assignment)
        check_entries(roster, rules, [each.neuron for each in self.subnet.miners], places=places)

    def reason(self, roster, **options):
        with pytest.raises(RejectedError) as caught:
            self.check(roster, **options)
        return caught.value.reason

    def changed(self, **changes):
        """A roster whose publisher changed something in its second entry."""
        first, second, third = (self.entry(author) for author in self.miners)
        return self.roster(first, second.model_copy(update=changes), third)


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_an_honest_roster_passes(scene):
    scene.check(scene.roster())
    scene.check(scene.roster(scene.entry(scene.miners[1])))


def test_an_entry_rebuilds_the_signed_objects(scene):
    roster = scene.roster()
    for author, entry in zip(scene.miners, roster.entries, strict=True):
        manifest = manifest_of(author, WINDOW, payload_bytes(author, WINDOW))
        listed = Submission.listed(roster, entry)
        assert (listed.manifest, listed.entry) == (manifest, entry)
        check_signature(listed.sealed_commit)
        check_signature(listed.sealed_manifest)


def test_an_invented_entry_has_no_valid_signature(scene):
    other = payload_bytes(scene.miners[0], WINDOW, seed=9)
    for changes in (
        {"payload_sha256": "00" * 32},
        {"root_before": "00" * 32},
        {"commit_signature": "00" * 64},
        {"manifest_signature": "00" * 64},
        {"payload_bytes": len(other) + 1},
        {"steps": 4},
        {"tokens": 385},
    ):
        assert scene.reason(scene.changed(**changes)) is Reason.BAD_SIGNATURE


def test_a_signature_for_another_window_does_not_count(scene):
    old = manifest_of(scene.miners[1], WINDOW - 1, payload_bytes(scene.miners[1], WINDOW - 1))
    roster = scene.changed(
        commit_signature=seal(old.commit, scene.miners[1].hotkey).signature,
        manifest_signature=seal(old, scene.miners[1].hotkey).signature,
    )
    assert scene.reason(roster) is Reason.BAD_SIGNATURE


def test_times_must_lie_in_their_intervals(scene):
    for field, interval, early, late in (
        ("committed_at", scene.times.commit_interval, Reason.COMMIT_EARLY, Reason.COMMIT_LATE),
        ("revealed_at", scene.times.reveal_interval, Reason.REVEAL_EARLY, Reason.REVEAL_LATE),
    ):
        for second in (interval.first, interval.last):
            scene.check(scene.changed(**{field: second}))
        assert scene.reason(scene.changed(**{field: interval.first - 1})) is early
        assert scene.reason(scene.changed(**{field: interval.last + 1})) is late


def test_only_miners_with_their_own_hotkeys_are_listed(scene):
    validator = scene.subnet.validators[0]
    assert scene.reason(scene.roster(scene.entry(validator))) is Reason.WRONG_IDENTITY
    assert scene.reason(scene.changed(hotkey=validator.hotkey.address)) is Reason.WRONG_IDENTITY
    stranger = scene.entry(scene.miners[2]).model_copy(update={"uid": 99})
    assert scene.reason(scene.roster(stranger)) is Reason.WRONG_IDENTITY


def test_entries_have_their_uids_assignment_and_a_place(scene):
    for assignment in ("00" * 32, None):
        assert scene.reason(scene.roster(), assignment=assignment) is Reason.WRONG_ASSIGNMENT
    assert scene.reason(scene.roster(), places=2) is Reason.MALFORMED


def test_the_digest_does_not_depend_on_signatures(scene):
    """sr25519 signatures differ from one signing to the next, and two equal windows must have one roster."""
    first, second = scene.roster(), scene.roster()
    assert first != second
    assert first.digest == second.digest
    assert scene.changed(payload_sha256="00" * 32).digest != first.digest
