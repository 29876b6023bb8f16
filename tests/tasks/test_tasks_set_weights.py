"""What the step that sets weights ends as."""

from typing import Any

import pytest
from prefect.client.schemas.objects import State

from tasks.host import hosting
from tasks.set_weights import set_weights
from templar.errors import Reason
from templar.neuron.validator import Validator, WeightsReport
from tests.support.recording import recording_node

NAME = "recorded"


def ends_as(report: WeightsReport | None) -> Any:
    node, _ = recording_node(Validator, set_weights=report)
    with hosting(NAME, node):
        return set_weights.fn(NAME, None)


@pytest.mark.parametrize(
    "report",
    [None, WeightsReport(4, {1: 1.0}, None), WeightsReport(4, {}, Reason.NOBODY_EARNED, "no positive score", 0)],
    ids=["not due", "set", "nobody"],
)
def test_what_is_no_refusal_is_handed_on(report: WeightsReport | None) -> None:
    assert ends_as(report) is report


def test_refused_weights_do_not_look_like_success() -> None:
    report = WeightsReport(4, {}, Reason.NOT_ENOUGH_STAKE, "the chain says: stake more", 1)
    state = ends_as(report)
    assert isinstance(state, State)
    assert (state.name, state.is_completed(), state.data) == ("WeightsRefused", True, report)
    assert str(state.message).startswith("window 4 [not_enough_stake] the chain says: stake more")
