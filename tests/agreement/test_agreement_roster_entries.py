"""A roster's entries: what their authors signed, in time, for this window, with a place and an assignment."""

import pytest

from templar.agreement.roster import check_entries
from templar.errors import Reason, RejectedError
from templar.exchange.objects import Roster
from templar.exchange.reveal import RevealRules, Submission
from templar.exchange.signed import check_signature, seal
from tests.support.errors import raising
from tests.support.subnet import ASSIGNMENT, NETWORK, Subnet, manifest_of, payload_bytes, submission_of

WINDOW = 3


class Scene:
    """A roster of three miners, and the rules that it must meet."""

    def __init__(self, folder):
        self.subnet = Subnet(folder, num_miners=4)
        self.times, self.miners = self.subnet.times(WINDOW), self.subnet.miners[:3]

    def entry(self, author):
        signed = manifest_of(author, WINDOW, payload_bytes(author, WINDOW))
        return submission_of(author, signed, self.times.commit_interval.last, self.times.reveal_interval.first).entry

    def roster(self, *entries):
        listed = entries or tuple(self.entry(author) for author in self.miners)
        fields = {"window": WINDOW, "previous": None, "peer_list": None, "aggregate_sha256": "ab" * 32}
        total = sum(entry.payload_bytes for entry in listed)
        return Roster(**self.subnet.validators[0].signing, **fields, entries=listed, aggregate_bytes=total, plan=None)

    def changed(self, **changes):
        """A roster whose publisher changed something in its second entry."""
        first, second, third = (self.entry(author) for author in self.miners)
        return self.roster(first, second.model_copy(update=changes), third)

    def check(self, roster, places=3, assignment=ASSIGNMENT):
        rules = RevealRules(NETWORK, self.times, lambda uid: assignment)
        check_entries(roster, rules, [each.neuron for each in self.subnet.miners], places=places)

    def refused(self, reason, roster, **options):
        with raising(RejectedError, reason):
            self.check(roster, **options)


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_an_honest_roster_passes_and_its_entries_rebuild_the_signed_objects(scene):
    scene.check(scene.roster(scene.entry(scene.miners[1])))
    roster = scene.roster()
    scene.check(roster)
    for author, entry in zip(scene.miners, roster.entries, strict=True):
        listed = Submission.listed(roster, entry)
        assert (listed.manifest, listed.entry) == (manifest_of(author, WINDOW, payload_bytes(author, WINDOW)), entry)
        check_signature(listed.sealed_commit)
        check_signature(listed.sealed_manifest)


def test_an_invented_entry_or_one_of_another_window_has_no_valid_signature(scene):
    author, other = scene.miners[1], payload_bytes(scene.miners[0], WINDOW, seed=9)
    old = manifest_of(author, WINDOW - 1, payload_bytes(author, WINDOW - 1))
    signatures = [seal(body, author.hotkey).signature for body in (old.commit, old)]
    for changes in (
        {"payload_sha256": "00" * 32},
        {"root_before": "00" * 32},
        {"commit_signature": "00" * 64},
        {"manifest_signature": "00" * 64},
        {"payload_bytes": len(other) + 1},
        {"steps": 4},
        {"tokens": 385},
        dict(zip(("commit_signature", "manifest_signature"), signatures, strict=True)),
    ):
        scene.refused(Reason.BAD_SIGNATURE, scene.changed(**changes))


def test_times_must_lie_in_their_intervals(scene):
    for field, interval, early, late in (
        ("committed_at", scene.times.commit_interval, Reason.COMMIT_EARLY, Reason.COMMIT_LATE),
        ("revealed_at", scene.times.reveal_interval, Reason.REVEAL_EARLY, Reason.REVEAL_LATE),
    ):
        for second in (interval.first, interval.last):
            scene.check(scene.changed(**{field: second}))
        scene.refused(early, scene.changed(**{field: interval.first - 1}))
        scene.refused(late, scene.changed(**{field: interval.last + 1}))


def test_entries_are_of_miners_with_their_own_hotkeys_an_assignment_and_a_place(scene):
    validator = scene.subnet.validators[0]
    stranger = scene.entry(scene.miners[2]).model_copy(update={"uid": 99})
    for roster in (
        scene.roster(scene.entry(validator)),
        scene.changed(hotkey=validator.hotkey.address),
        scene.roster(stranger),
    ):
        scene.refused(Reason.WRONG_IDENTITY, roster)
    for assignment in ("00" * 32, None):
        scene.refused(Reason.WRONG_ASSIGNMENT, scene.roster(), assignment=assignment)
    scene.refused(Reason.MALFORMED, scene.roster(), places=2)


def test_the_digest_does_not_depend_on_signatures(scene):
    """sr25519 signatures differ from one signing to the next, and two equal windows must have one roster."""
    first, second = scene.roster(), scene.roster()
    assert first != second
    assert first.digest == second.digest
    assert scene.changed(payload_sha256="00" * 32).digest != first.digest
