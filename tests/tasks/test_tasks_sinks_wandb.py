"""Weights & Biases, with its real client: runs that go on over restarts, and a W&B that is not there."""

import json
import logging
import os
from dataclasses import replace
from itertools import pairwise

import pytest

from tasks.sinks import sending, wandb
from tasks.sinks.attached import NeuronSinks, SinkSettings
from tasks.sinks.sending import QueueState
from tasks.sinks.wandb import WandbError, WandbRun, rows_of, run_settings
from tests.support.operator import wait_until
from tests.support.scripted_server import serving
from tests.support.sinks import FIGURES, TRAINED, WHO, Receiver

KEY = "0123456789abcdef0123456789abcdef01234567"


def environment(**more):
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return own | {"TEMPLAR_SINK_WANDB_PROJECT": "team/training"} | more


def test_offline_a_run_is_written_and_a_second_process_goes_on_with_it(tmp_path):
    settings = SinkSettings.of(environment())
    run_id = run_settings(settings.wandb_project, WHO, tmp_path)["id"]
    for _ in range(2):
        sinks = NeuronSinks(settings, WHO, tmp_path, environment(WANDB_MODE="offline"))
        sinks.put(FIGURES)
        wait_until(lambda sinks=sinks: sinks.queues()["wandb"] == QueueState(0, 0), "the process has taken it")
        (sender,) = sinks._points
        sinks.close()
        sender._thread.join()
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    for folder in folders:
        assert folder.name.endswith(f"-{run_id}")
        written = (folder / f"run-{run_id}.wandb").read_bytes()
        for text in ("training", "team", "validator", "netuid-3-aaaaaaaaaaaa", "validator/loss", "3.5", "5Hotkey"):
            assert text.encode() in written, text


def test_a_run_is_the_neurons_its_group_the_network_and_its_job_the_role(tmp_path):
    settings = run_settings("training", WHO, tmp_path)
    assert (settings["project"], settings["entity"], settings["resume"]) == ("training", None, "allow")
    assert (settings["group"], settings["job_type"]) == ("netuid-3-aaaaaaaaaaaa", "validator")
    assert json.dumps(settings)  # an argument of the process
    (row,) = rows_of(sending.Point(FIGURES))
    assert row["figures"] == {
        "window": 12,
        "validator/network/window": 12,
        "validator/loss": 3.5,
        "validator/weights/3": 0.75,
        "validator/weights/5": 0.25,
        "validator/retries/alice/store_busy": 2,
        "validator/slash/5/missing_gradient/absent": 1,
    }


def test_the_inner_steps_of_a_window_are_rows_on_the_way_to_it(tmp_path):
    rows = [row for window in (12, 13) for row in rows_of(sending.Point(replace(TRAINED, window=window)))]
    assert [row["figures"]["window"] for row in rows] == [11.25, 11.5, 12, 12, 12.25, 12.5, 13, 13]
    assert all(later["step"] > row["step"] for row, later in pairwise(rows))
    last, window = rows[2:4]
    assert last["figures"] == {"miner/steps/inner_step": 3, "miner/steps/loss": 4.0, "window": 12}
    assert window["figures"] == {"miner/loss": 4.0, "miner/timing/training": 8.0, "window": 12}
    run = WandbRun("training", KEY, WHO, tmp_path, environment(WANDB_MODE="offline"))
    run.send([sending.Point(TRAINED)])
    run.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"miner/steps/loss" in file.read_bytes()


def test_without_a_key_there_is_one_warning_and_nothing_is_left_on_the_disk(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sending, "PAUSES", (0.01,))
    monkeypatch.setenv("HOME", str(tmp_path))  # no credentials of the user's
    tries: list[str] = []

    class Counting(WandbRun):
        def send(self, items):
            tries.append("")
            super().send(items)  # type: ignore[arg-type]

    monkeypatch.setattr("tasks.sinks.attached.WandbRun", Counting)
    settings = SinkSettings.of(environment())
    with caplog.at_level(logging.INFO, "templar.sinks"):
        sinks = NeuronSinks(settings, WHO, tmp_path, environment(HOME=str(tmp_path)))
        sinks.put(FIGURES)
        wait_until(lambda: len(tries) >= 3, "it was tried again")
        sinks.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the sink wandb takes nothing; no window waits for it: No API key configured" in caplog.text
    assert [*(tmp_path / "wandb").glob("run-*")] == []


def test_a_server_that_hangs_is_given_up_and_the_key_is_in_no_message(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "ANSWER_SECONDS", 2.0)
    with serving(Receiver()) as server:
        server.hanging.set()
        run = WandbRun("training", KEY, WHO, tmp_path, environment(WANDB_BASE_URL=server.endpoint_url))
        with pytest.raises(WandbError, match="no answer within 2 s") as caught:
            run.send([sending.Point(FIGURES)])
    assert KEY not in str(caught.value)
    assert KEY not in repr(SinkSettings(wandb_token=KEY))
    assert run._without_key(f"refused {KEY}") == "refused ***"
    run.close()


def test_a_process_that_ended_is_started_again(tmp_path):
    run = WandbRun("training", KEY, WHO, tmp_path, environment(WANDB_MODE="offline"))
    run.send([sending.Point(FIGURES)])
    process = run._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises((OSError, WandbError)):
        run.send([sending.Point(FIGURES)])
    run.send([sending.Point(FIGURES)])
    run.close()
    assert run._process is None
