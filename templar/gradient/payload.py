"""What a miner publishes, as values: header and coefficients. `sections` and `wire` turn them into bytes and back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from templar.gradient import Recipe, backend
from templar.gradient.layout import Layout
from templar.gradient.sections import Section, pack
from templar.gradient.values import Coefficients


@dataclass(frozen=True)
class Header:
    """Who made a payload, when, and for which model.

    Attributes:
        recipe: The recipe it was made by.
        window: The window it was made in.
        uid: The miner's uid.
        hotkey: The miner's hotkey, 1 to 48 printable ASCII characters.
        layout_digest: `Layout.digest` of the tensors that follow.
    """

    recipe: Recipe
    window: int
    uid: int
    hotkey: str
    layout_digest: str


@dataclass(frozen=True)
class Payload:
    """One miner's contribution to one window. In memory it takes little more than its bytes.

    Attributes:
        header: Who, when, for which model.
        sections: The coefficients by parameter name, as they are published, for every tensor of the layout.
    """

    header: Header
    sections: Mapping[str, Section]

    @classmethod
    def of(cls, header: Header, coefficients: Mapping[str, Coefficients], layout: Layout) -> Self:
        """What a compression gave, packed.

        Raises:
            ValueError: It is not legal for this layout; nobody would accept it.
        """
        if set(coefficients) != set(layout.names):
            raise ValueError("the payload does not have exactly the tensors of the layout")
        fast = backend.uses_kernels(layout.num_elements)
        return cls(header, {each.name: pack(coefficients[each.name], each, fast=fast) for each in layout.tensors})


def check_layout(payloads: Iterable[Payload], layout: Layout) -> None:
    """Refuse payloads that were made for another layout.

    Raises:
        ValueError: One was.
    """
    for payload in payloads:
        if payload.header.layout_digest != layout.digest:
            raise ValueError(f"the payload of uid {payload.header.uid} was made for another layout")
