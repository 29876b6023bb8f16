"""What a window was decided to be, as a node found it in the slots or replays it from the decisions."""

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from templar.exchange.cache import PayloadCache
from templar.exchange.objects import Roster
from templar.exchange.sealing import Sealed
from templar.exchange.slots import PassedOver


@dataclass(frozen=True)
class Settlement:
    """What a window was decided to be.

    Attributes:
        window: The window.
        roster: The roster that is applied; None for a null window.
        signature: Its publisher's signature, or that of `empty`; None where it is not known.
        passed_over: Publishers whose turn passed without a roster that counts.
        empty: The roster without entries that made the window null; None if it was not one.
    """

    window: int
    roster: Roster | None
    signature: str | None = None
    passed_over: tuple[PassedOver, ...] = ()
    empty: Roster | None = None

    @classmethod
    def of(cls, window: int, decided: Sealed[Roster] | None, passed_over: tuple[PassedOver, ...] = ()) -> "Settlement":
        """What a decided roster makes of a window; without entries, or without any, it is null."""
        if decided is None:
            return cls(window, None, None, passed_over)
        roster, signature = decided.body, decided.signature
        if roster.entries:
            return cls(window, roster, signature, passed_over)
        return cls(window, None, signature, passed_over, empty=roster)

    @property
    def digest(self) -> str | None:
        """The decision: the roster's digest, or None."""
        return None if self.roster is None else self.roster.digest

    @property
    def sealed(self) -> Sealed[Roster] | None:
        """The roster that decided, as it was signed; None where there was none, or its signature is not known."""
        roster = self.roster or self.empty
        return None if roster is None or self.signature is None else Sealed(roster, self.signature)

    @property
    def uids(self) -> tuple[int, ...]:
        """Whose payloads are applied."""
        return () if self.roster is None else tuple(entry.uid for entry in self.roster.entries)

    def has_payloads(self, cache: PayloadCache) -> bool:
        """Whether everything that is applied is in a cache."""
        entries = () if self.roster is None else self.roster.entries
        return all(
            cache.has(entry.payload_sha256, window=self.window, uid=entry.uid, hotkey=entry.hotkey) for entry in entries
        )

    def to_json(self) -> str:
        """For the journal."""
        return _JSON.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Settlement | None":
        """What `to_json` wrote; None for what another release wrote."""
        try:
            return _JSON.validate_json(text)
        except ValidationError:
            return None


_JSON = TypeAdapter(Settlement)
