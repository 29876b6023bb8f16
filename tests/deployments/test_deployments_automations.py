"""The automations of a neuron on a real Prefect server: each alert reaches the operator's webhook."""

import json
from functools import partialmethod
from uuid import uuid4

import httpx
import pytest
from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Crashed, Failed, Running

from deployments.automations import LATE_TIMES, REMEDIES, alert_block, definitions, deploy_automations
from deployments.register import ensure_pool
from deployments.schedules import HOUSEKEEPING_POOL
from tasks.alerts import Alert, Raised, send
from templar.errors import PermanentError, Reason
from tests.support.errors import raising
from tests.support.operator import wait_until
from tests.support.scripted_server import Reply, ScriptedServer, serving

pytestmark = pytest.mark.usefixtures("prefect_api")
LONG = 3600.0


class Webhook(ScriptedServer):
    @property
    def messages(self):
        return [json.loads(request.body) for request in self.requests]


@pytest.fixture
def webhook():
    with serving(Webhook(lambda _: Reply())) as server:
        yield server


@pytest.fixture
def neuron(prefect_server):
    """A neuron's name; its automations are removed in the end."""
    name = f"watched-{uuid4().hex[:8]}"
    yield name
    with prefect_server.client() as client:
        deploy_automations(client, [], name)


@pytest.fixture
def deploy(prefect_server, webhook):
    """Deploys a neuron's automations, which post to the webhook; returns what is on the server, by name."""
    document = f"hook-{uuid4().hex[:8]}"
    CustomWebhookNotificationBlock(
        name=document, url=webhook.endpoint_url, json_data={"subject": "{{subject}}", "body": "{{body}}"}
    ).save(document)
    notifying = alert_block({"TEMPLAR_ALERT_BLOCK": f"custom-webhook/{document}"})

    def call(neuron, *, seconds=LONG, block=notifying):
        with prefect_server.client() as client:
            deploy_automations(client, definitions(neuron, seconds, block), neuron)
            return automations(prefect_server, neuron)

    return call


def automations(server, neuron):
    with server.client() as client:
        found = client.read_automations(limit=200)
    return {each.name: each for each in found if f"neuron:{neuron}" in each.tags}


def raise_alert(neuron, alert):
    send(neuron, [Raised(alert, Reason.STORE_BUSY, f"text of {alert}")])


def test_every_alert_is_sent_with_its_text_and_its_remedy_to_the_operator_of_that_neuron(deploy, webhook, neuron):
    """An alert of late windows is told at the third one; one of another neuron is not told."""
    deploy(neuron)
    for alert in Alert:
        raise_alert("somebody-else", alert)
    expected = {f"{neuron}: {alert}": alert for alert in Alert}
    for alert in Alert:
        raise_alert(neuron, alert)
    expected.pop(f"{neuron}: {Alert.LATE}")
    wait_until(lambda: len(webhook.messages) >= len(expected), "the alerts come")
    for _ in range(LATE_TIMES - 1):
        raise_alert(neuron, Alert.LATE)
    wait_until(lambda: len(webhook.messages) > len(expected), "late windows are told")
    said = {message["subject"]: message["body"] for message in webhook.messages}
    assert len(said) == len(webhook.messages) == len(Alert)
    for alert in Alert:
        body = said[f"{neuron}: {alert}"]
        assert body == f"text of {alert}\n" + REMEDIES[alert].format(neuron=neuron)


def test_a_killed_run_is_told(deploy, webhook, neuron, prefect_server):
    deploy(neuron)
    with prefect_server.client() as client:
        for tag in ("neuron:somebody-else", f"neuron:{neuron}"):
            run = client.create_flow_run(flow(name="miner-window")(lambda: None), tags=[tag])
            client.set_flow_run_state(run.id, Running())
            client.set_flow_run_state(run.id, Crashed(message="killed"))
    wait_until(lambda: webhook.messages != [], "the crash is told")
    (message,) = webhook.messages
    assert message["subject"] == f"{neuron}: crashed"


def test_scheduled_work_that_fails_is_told(deploy, webhook, neuron, prefect_server):
    """A window that fails is told by its own alert."""
    deploy(neuron)
    with prefect_server.client() as client:
        for pool, kind in (("windows-only", "resident"), (HOUSEKEEPING_POOL, "process")):
            ensure_pool(client, pool, kind)
            made = client.create_deployment(
                client.create_flow_from_name("any"), name=neuron, work_pool_name=pool, tags=[f"neuron:{neuron}"]
            )
            run = client.create_flow_run_from_deployment(made)
            client.set_flow_run_state(run.id, Running())
            client.set_flow_run_state(run.id, Failed(message="no room"))
            client.delete_deployment(made)
    wait_until(lambda: webhook.messages != [], "the failure is told")
    (message,) = webhook.messages
    assert message["subject"] == f"{neuron}: failed"


def test_a_neuron_whose_windows_do_not_begin_is_told(deploy, webhook, neuron):
    """The shortest time that Prefect waits for an event that does not come, 10 s, is that of windows of a second."""
    deploy(neuron, seconds=1.0)
    wait_until(lambda: webhook.messages != [], "the silence is told", patience_seconds=90)
    assert webhook.messages[0]["subject"] == f"{neuron}: silent"


def test_deploying_again_changes_nothing_but_what_differs(deploy, neuron, prefect_server, monkeypatch):
    first = deploy(neuron)
    assert set(first) == {f"{neuron}: {what}" for what in (*Alert, "crashed", "failed", "silent")}
    before = stamps(prefect_server, neuron)
    deploy(neuron)
    assert stamps(prefect_server, neuron) == before
    # What an operator has switched off stays off, also where its trigger is changed.
    off = first[f"{neuron}: silent"]
    with prefect_server.client() as client:
        client.pause_automation(off.id)
    changed = deploy(neuron, seconds=2 * LONG)
    assert {name: each.id for name, each in changed.items()} == {name: each.id for name, each in first.items()}
    assert not changed[off.name].enabled
    assert changed[off.name].trigger != off.trigger
    assert all(each.enabled for each in changed.values() if each.id != off.id)
    # Without a block they go; those of another neuron stay.
    other = f"{neuron}-other"
    deploy(other)
    # An answer of the server has at most so many: here another neuron's, which come first, leave no room.
    limited = partialmethod(SyncPrefectClient.read_automations, limit=len(first))
    monkeypatch.setattr(SyncPrefectClient, "read_automations", limited)
    assert deploy(neuron, block=None) == {}
    assert len(automations(prefect_server, other)) == len(first)
    assert deploy(other, block=None) == {}


def stamps(server, neuron):
    answer = httpx.post(f"{server.server.api_url}/automations/filter", json={})
    return {each["name"]: each["updated"] for each in answer.json() if f"neuron:{neuron}" in each["tags"]}


def test_a_block_that_cannot_notify_is_refused():
    assert alert_block({}) is alert_block({"TEMPLAR_ALERT_BLOCK": ""}) is None
    Secret(value="x").save(name := f"secret-{uuid4().hex[:8]}")
    for value, words in (
        ("slack-webhook/nobody", "create the block in the UI, or leave it empty"),
        ("no-slash", "create the block in the UI, or leave it empty"),
        (f"secret/{name}", "which cannot notify: name a notification block"),
    ):
        with raising(PermanentError, Reason.BAD_ENVIRONMENT, "TEMPLAR_ALERT_BLOCK", value, words):
            alert_block({"TEMPLAR_ALERT_BLOCK": value})
