"""Payloads of any model, compressed from given updates."""

from dataclasses import replace

import torch

from templar.gradient.codec.wire import Header, Payload
from templar.gradient.compress import FeedbackRule, FeedbackState, compress

HOTKEY = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"


def random_update(layout, seed):
    """Normal numbers, of another scale in each tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        tensor.name: torch.randn(tensor.shape, generator=generator) * 2.0 ** -(place % 4)
        for place, tensor in enumerate(layout.tensors)
    }


def payload_of(layout, update, *, uid=0):
    """The payload of an update, without error feedback: equal updates give equal payloads."""
    rule = FeedbackRule("sparseloco", decay=0.95, learning_rate=1.0)
    found = compress(FeedbackState.zeros(layout), update, layout=layout, rule=rule)
    return Payload.of(Header(layout.recipe, 1, uid, HOTKEY, layout.digest), found.tensors, layout)


def random_payload(layout, seed, *, size=1.0, uid=0):
    return payload_of(layout, {name: size * tensor for name, tensor in random_update(layout, seed).items()}, uid=uid)


def zero_payload(layout):
    return payload_of(layout, {tensor.name: torch.zeros(tensor.shape) for tensor in layout.tensors})


def mixed(one, other, is_of_one):
    return replace(one, sections={name: (one if is_of_one(name) else other).sections[name] for name in one.sections})
