"""The held-out curve of a network: read from the signed evaluations of its checkpoints, and from nothing else."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from lab.simulate.world import DATASET_BUCKET, DATASET_PREFIX
from templar.agreement.checkpoint import EVALUATION_FILE
from templar.chain.hotkey import Signer
from templar.data.dataset import read_held_out_texts
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, checkpoint_key, parse_current_key, window_key
from templar.exchange.objects import CheckpointEvaluation, PlanEntry
from templar.exchange.signed import seal, unseal
from templar.housekeeping.maintenance import publish_newest_checkpoint
from templar.reports import checkpoint_evaluation, history
from templar.reports.checkpoint_evaluation import HeldOutPoint, evaluate_checkpoints, read_evaluations
from templar.reports.model_card import PICTURE_FILE
from templar.reports.text_score import TextScore
from templar.reports.training_curve import NetworkCurve, draw_held_out, held_out_rows
from templar.store.directory import DirectoryStore
from tests.support.errors import raising
from tests.support.network import tiny

PUBLISHERS = ("aggregator-1", "validator-2")
WINDOWS = (2, 4, 6)


def evaluate(network, name, tasks=None):
    """Let a member measure its checkpoints on the network's held-out text; the windows that were measured now."""
    stores, config = [network.world.stage.open_store(DATASET_BUCKET)], network.config(name)

    def read_texts(tokenizer, most):
        data, folder = network.hparams.data, config.home / "shards"
        return read_held_out_texts(stores, DATASET_PREFIX, data, folder, tokenizer=tokenizer, most=min(most, 32))

    return [each.window for each in evaluate_checkpoints(config, read_texts, tasks) if each.is_new]


@pytest.fixture(scope="module")
def trained(build_shared):
    """Six windows, and checkpoints of three of them by two publishers, each measured before the next one is made."""
    network = build_shared(tiny(training={"inner_steps": 6}))
    for window in WINDOWS:
        network.run([window - 1, window])
        for name in PUBLISHERS:
            publish_newest_checkpoint(network.config(name))
            evaluate(network, name)
    network.to_window(WINDOWS[-1] + 2)
    return network


def read(network, known=None):
    """The evaluations as a miner's host sees them."""
    miner = network.miners[0]
    return read_evaluations(miner.config.reading(miner.birth), miner.birth, known)


def key_of(network, name, window):
    return checkpoint_key(window, network.member(name).uid, EVALUATION_FILE)


def stored(network, name, window):
    return unseal(network.bucket(name).get(key_of(network, name, window), max_bytes=1 << 20), CheckpointEvaluation).body


class TestCurve:
    def test_a_point_per_checkpoint_with_tokens_time_and_all_who_found_it(self, trained):
        found = read(trained)
        uids = tuple(trained.member(name).uid for name in PUBLISHERS)
        assert [point.window for point in found.points] == [0, *WINDOWS]
        assert [set(point.uids) for point in found.points] == [{uids[0]}, *[set(uids)] * 3]
        assert not found.left_out

        tokens = {0: 0}
        for window in range(1, WINDOWS[-1] + 1):
            roster = trained.roster(window)
            assert roster is not None
            tokens[window] = tokens[window - 1] + sum(entry.tokens for entry in roster.entries)
        assert tokens[WINDOWS[-1]] > 0
        assert [point.trained for point in found.points] == [tokens[point.window] for point in found.points]

        rules = trained.hparams.windows
        seconds = [rules.blocks_per_window * rules.block_seconds * point.window for point in found.points]
        assert [point.hours * 3600 for point in found.points] == pytest.approx(seconds)

    def test_a_bucket_that_cannot_be_read_costs_its_own_word_alone(self, trained, monkeypatch):
        silent, other = map(trained.member, PUBLISHERS)
        known, reader = read(trained), trained.miners[0]
        monkeypatch.setattr(reader.buckets, "reader", reader.buckets.reader)  # as it is now, after this test
        trained.blind(reader, silent.name)
        found = read(trained, known)
        assert [point.uids for point in found.points] == [(other.uid,)] * 3
        assert {place: error.reason for place, error in found.left_out.items()} == {
            (silent.hotkey.address, None): Reason.STORE_UNREACHABLE
        }

    def test_the_time_of_a_pruned_block_is_estimated(self, trained, monkeypatch):
        whole, chain = read(trained), trained.miners[0].exchange.chain
        real, newest = chain.block_time, chain.block()

        def pruned(number, *, finalized=True):
            if number < newest:
                raise PermanentError(Reason.BLOCK_UNKNOWN, f"block {number} is pruned")
            return real(number, finalized=finalized)

        monkeypatch.setattr(chain, "block_time", pruned)
        assert [point.hours for point in read(trained).points] == pytest.approx([point.hours for point in whole.points])


Forge = Callable[[CheckpointEvaluation, Signer], bytes]


def sealed(body, signer, **changes):
    return seal(body.model_copy(update=changes), signer).encode()


HOSTILE: dict[str, tuple[Forge, Reason]] = {
    "not an object": (lambda body, signer: b"{}", Reason.MALFORMED),
    "another window's": (partial(sealed, window=2), Reason.WRONG_WINDOW),
    "another network's": (partial(sealed, genesis="ab" * 32), Reason.WRONG_NETWORK),
    "another uid's": (partial(sealed, uid=77), Reason.WRONG_IDENTITY),
    "another state": (partial(sealed, root="ab" * 32), Reason.ROOT_DIFFERS),
    "more tokens than possible": (partial(sealed, trained=2**53), Reason.MALFORMED),
}


class TestHostile:
    """One of two evaluations of the newest checkpoint is replaced: the curve stays, on the word of the other one."""

    LAST = WINDOWS[-1]

    @pytest.mark.parametrize("name", HOSTILE)
    def test_what_is_not_legal_is_left_out_with_its_reason(self, trained, name):
        forge, reason = HOSTILE[name]
        liar, honest = trained.member(PUBLISHERS[0]), trained.member(PUBLISHERS[1])
        before = read(trained)
        with self.replaced(trained, forge(stored(trained, liar.name, self.LAST), liar.hotkey)):
            found = read(trained)
        assert [point.score for point in found.points] == [point.score for point in before.points]
        assert found.points[-1].uids == (honest.uid,)
        assert {place: error.reason for place, error in found.left_out.items()} == {
            (liar.hotkey.address, self.LAST): reason
        }

    def test_of_two_that_differ_the_one_with_more_stake_counts(self, trained):
        members = {member.hotkey.address: member for member in map(trained.member, PUBLISHERS)}
        ranked = [each.hotkey for each in trained.miners[0].exchange.newest_metagraph().validators()]
        first, second = (members[hotkey] for hotkey in ranked)
        before = read(trained).points[-1]
        for liar, wins in ((second, False), (first, True)):
            body = stored(trained, liar.name, self.LAST)
            with self.replaced(trained, sealed(body, liar.hotkey, nats=body.nats / 2), liar.name):
                found = read(trained)
            assert (found.points[-1].score == before.score) is not wins
            assert found.points[-1].uids == (first.uid,)
            assert {place: error.reason for place, error in found.left_out.items()} == {
                (second.hotkey.address, self.LAST): Reason.EVIDENCE_DIFFERS
            }

    def test_a_window_to_come_is_left_out_until_it_is_closed(self, trained):
        liar, far = trained.member(PUBLISHERS[0]), 10**9
        body, key = stored(trained, liar.name, self.LAST), checkpoint_key(far, liar.uid, EVALUATION_FILE)
        trained.bucket(liar).put(key, sealed(body, liar.hotkey, window=far))
        try:
            found = read(trained)
            again = read(trained, found)
        finally:
            trained.bucket(liar).delete([key])
        assert again.points == found.points
        assert [point.window for point in found.points] == [0, *WINDOWS]
        for reading in (found, again):
            (error,) = reading.left_out.values()
            assert (type(error), error.reason) == (RejectedError, Reason.WRONG_WINDOW)

    def test_a_state_that_nobody_proved_waits_for_its_proof(self, trained, monkeypatch):
        monkeypatch.setattr(checkpoint_evaluation, "proven_state", lambda *_: None)
        found = read(trained)
        assert [point.window for point in found.points] == [0]
        assert {(type(error), error.reason) for error in found.left_out.values()} == {
            (TransientError, Reason.ROOT_DIFFERS)
        }
        monkeypatch.undo()
        assert read(trained, found).points == read(trained).points

    @contextmanager
    def replaced(self, network, data, name=PUBLISHERS[0]):
        """The evaluation of the newest checkpoint in a publisher's bucket is these bytes for a while."""
        bucket, key = network.bucket(name), key_of(network, name, self.LAST)
        real = bucket.get(key, max_bytes=1 << 20)
        bucket.put(key, data)
        try:
            yield
        finally:
            bucket.put(key, real)


def point(window, trained, nats, results=()):
    return HeldOutPoint(window, (4, 9), window / 2, trained, TextScore(8, 100, 400, nats), results)


class TestShown:
    POINTS = (point(0, 0, 600.0), point(2, 1_000_000, 450.0, (("arc", "acc", 0.25),)), point(200, None, 300.0))

    def test_rows_say_what_is_not_known(self):
        first, second, third = held_out_rows(self.POINTS)
        assert first == {
            "window": "0",
            "tokens trained": "0",
            "time": "0 min",
            "loss": "6.0000",
            "bits per byte": f"{1.5 / math.log(2):.4f}",
            "tasks": "none",
            "by": "uid 4, uid 9",
        }
        assert (second["tokens trained"], second["time"]) == ("1,000,000", "60 min")
        assert second["tasks"] == "arc acc 0.2500"
        assert (third["tokens trained"], third["time"]) == ("unknown", "4.2 days")

    def test_the_drawing_has_tokens_and_time_on_its_axes(self):
        root = ET.fromstring(draw_held_out(self.POINTS))
        texts = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"6.00", "3.00", f"{1.5 / math.log(2):.2f}", f"{0.75 / math.log(2):.2f}"} <= texts
        assert {"1,000,000 tokens in the applied payloads", "4.2 days since the start", "0"} <= texts
        assert len(root.findall(".//{*}circle")) == 2 + 3, "a point without tokens is on the axis of time alone"
        texts = {each.text for each in ET.fromstring(draw_held_out((point(0, None, 600.0),))).iter()}
        assert "tokens are not known" in texts, "one point is enough"

    def test_the_networks_page_has_the_curve_beside_the_evaluation_curve(self, trained):
        miner = trained.miners[0]
        glance = NetworkCurve(miner.exchange, miner.birth, {}).look(WINDOWS[-1])
        assert glance.held_out == read(trained).points
        score = glance.held_out[-1].score
        assert dict(glance.rows)["held-out text"] == (
            f"{score.loss:.4f} nats per token, {score.bits_per_byte:.4f} bits per byte, after window 6"
        )
        assert "evaluations left out" not in dict(glance.rows)

    def test_the_page_names_what_is_left_out(self, trained):
        miner = trained.miners[0]
        with TestHostile().replaced(trained, b"{}"):
            rows = dict(NetworkCurve(miner.exchange, miner.birth, {}).look(WINDOWS[-1]).rows)
        assert rows["evaluations left out"].startswith("[malformed] checkpoint: ")

    def test_the_card_of_the_next_checkpoint_has_table_and_picture(self, trained):
        uid, bucket = trained.member(PUBLISHERS[0]).uid, trained.bucket(PUBLISHERS[0])

        def text_of(window, name):
            return bucket.get(checkpoint_key(window, uid, name), max_bytes=1 << 20).decode()

        card, points = text_of(6, "README.md"), [each for each in read(trained).points if each.window < 6]
        assert f"]({PICTURE_FILE})" in card
        for row in held_out_rows(points):
            assert f"| {row['window']} | {row['tokens trained']} | {row['time']} | {row['loss']} | " in card
        assert len(ET.fromstring(text_of(6, PICTURE_FILE)).findall(".//{*}circle")) == 2 * len(points)
        with pytest.raises(PermanentError):
            text_of(0, PICTURE_FILE)


def test_the_page_of_a_later_process_reads_what_is_new_alone(trained, tmp_path, monkeypatch):
    """Requests are counted at the stores; what was kept changes nothing of what is shown."""
    asked, path, miner = list[str](), tmp_path / "page.json", trained.miners[0]
    for name in ("get", "head", "list"):
        real = getattr(DirectoryStore, name)

        def count(store, key="", *, real=real, **options):
            asked.append(key)
            return real(store, key, **options)

        monkeypatch.setattr(DirectoryStore, name, count)

    def look(window, path=path):
        asked.clear()
        curve = NetworkCurve(miner.exchange, miner.birth, {})
        curve.restore(path)
        glance = curve.look(window)
        curve.keep(path)
        return glance, list(asked)

    # 1. All windows, then the new one: the newest that was known is read for its standings.
    _, every = look(5)
    found, few = look(6)
    windows = {parsed.window for key in few if (parsed := parse_current_key(key)) is not None}
    assert windows == {5, 6}
    assert not [key for key in few if key.endswith(EVALUATION_FILE)]
    assert len(few) < len(every) / 2
    assert found == look(6, tmp_path / "none.json")[0]

    # 2. A file that is damaged, or another network's, is as none.
    kept = path.read_text()
    for text in (kept[:-1], kept.replace(miner.birth.network.genesis, "f" * 64)):
        path.write_text(text)
        again, requests = look(6)
        assert again == found
        assert len(requests) > len(few)

    # 3. Evidence that was not there is asked for again, and its window not kept without.
    bucket, uid = trained.bucket(trained.validator), trained.member(trained.validator).uid
    key = window_key(Kind.EVIDENCE, 6, uid)
    data = bucket.get(key, max_bytes=1 << 30)
    path.unlink()
    bucket.delete([key])
    assert look(6)[0].points[-1].loss is None
    bucket.put(key, data)
    assert look(6)[0] == found


def test_results_of_tasks_are_signed_with_the_score(network):
    network.run([1])
    network.to_window(3)
    found = [("arc_easy", "acc", 0.25), ("arc_easy", "acc_norm", math.nan)]
    folders = list[Path]()

    def run_tasks(folder):
        assert (folder / "config.json").is_file()
        folders.append(folder)
        return found

    assert evaluate(network, PUBLISHERS[0], run_tasks) == [0]
    assert [each.results for each in read(network).points] == [(("arc_easy", "acc", 0.25),)]
    publish_newest_checkpoint(network.config(PUBLISHERS[0]))
    with raising(PermanentError, Reason.BAD_PARAMETERS, "257 results, at most 256"):
        evaluate(network, PUBLISHERS[0], lambda folder: found[:1] * 257)
    assert len(folders) == 1


def test_tokens_of_windows_that_have_expired_are_unknown_unless_they_were_counted_before(old):
    first, late = PUBLISHERS
    publish_newest_checkpoint(old.config(late))
    old.to_window(8)
    assert evaluate(old, late) == [6]
    assert {each.window: each.trained for each in read(old).points} == {6: None}
    assert evaluate(old, first) == [0, 2, 4, 6]
    trained = {each.window: each.trained or 0 for each in read(old).points}
    assert trained[0] == 0 < trained[2] < trained[4] < trained[6]


def test_tokens_are_unknown_while_a_roster_cannot_be_read(network, monkeypatch):
    def missing(*_):
        raise TransientError(Reason.DECISION_MISSING, "ask again later")

    network.run([1, 2])
    publish_newest_checkpoint(network.config(PUBLISHERS[0]))
    network.to_window(4)
    monkeypatch.setattr(history, "decided_roster", missing)
    evaluate(network, PUBLISHERS[0])
    assert [each.trained for each in read(network).points] == [0, None]


def test_no_payload_counts_for_more_than_its_windows_training(network, monkeypatch):
    """A miner states its tokens itself; the owners changed the training at window 2."""
    training, real = network.hparams.training, history.decided_roster
    changes = {"training.inner_steps": training.inner_steps + 1}
    entry = PlanEntry(number=1, previous=network.world.birth.start.digest, first_window=2, changes=changes)
    for node in network.nodes.values():
        node.state.plan = node.state.plan.after(entry)

    def boasting(exchange, window):
        roster, publisher = real(exchange, window) or (None, None)
        assert roster is not None
        entries = tuple(entry.model_copy(update={"tokens": 2**40}) for entry in roster.entries)
        return roster.model_copy(update={"entries": entries}), publisher

    network.run([1, 2])
    publish_newest_checkpoint(network.config(PUBLISHERS[0]))
    network.to_window(4)
    monkeypatch.setattr(history, "decided_roster", boasting)
    monkeypatch.setattr(checkpoint_evaluation, "MAX_PEERS", len(network.miners))
    evaluate(network, PUBLISHERS[0])
    assert [len(network.roster(window).entries) for window in (1, 2)] == [len(network.miners)] * 2
    most = (2 * training.inner_steps + 1) * training.batch_size * network.hparams.data.sequence_length
    assert [each.trained for each in read(network).points] == [0, most * len(network.miners)]
