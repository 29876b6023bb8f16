"""Reading environment variables so that every problem is reported at once, by name, and no value with it."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from prefect.blocks.core import Block
from pydantic import ValidationError

from templar.errors import PermanentError, Reason

B = TypeVar("B", bound=Block)


class EnvironmentReader:
    """Reads variables and collects what is wrong with them.

    Args:
        environment: Name -> value.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._problems: dict[str, str] = {}

    def text(self, name: str, default: str | None = None) -> str:
        """A variable; an empty one counts as missing. A missing one without a default is a problem."""
        value = self._environment.get(name, "").strip() or default
        if value is None:
            self.problem(name, "is missing")
            return ""
        return value

    def number(self, name: str, default: float) -> float:
        """A variable that must be a number."""
        try:
            return float(self.text(name, str(default)))
        except ValueError:
            self.problem(name, "must be a number")
            return default

    def whole_number(self, name: str, default: int | None = None) -> int:
        """A variable that must be a whole number."""
        value = self.text(name, None if default is None else str(default))
        try:
            return int(value)
        except ValueError:
            self.problem(name, "must be a whole number")
            return default or 0

    def problem(self, name: str, text: str) -> None:
        """Note that something is wrong with a variable; the first note on it stands."""
        self._problems.setdefault(name, text)

    def are_fine(self, *names: str) -> bool:
        """Whether nothing was noted on any of these variables."""
        return not self._problems.keys() & set(names)

    def build(self, block_type: type[B], variables: Mapping[str, str], **fields: Any) -> B:
        """Make a block of what was read; what its fields refuse is noted, and the block is made unchecked.

        Args:
            block_type: The block.
            variables: Field -> the variable that it was read from; the other fields were checked before.
            fields: Its fields.
        """
        try:
            return block_type(**fields)
        except ValidationError as error:
            for place, text in refusals(error):
                field = place.partition(".")[0]
                self.problem(variables.get(field, f"{block_type.__name__}.{place}"), text)
            return block_type.model_construct(**fields)

    def raise_problems(self) -> None:
        """Raise everything that was noted.

        Raises:
            PermanentError: `bad_environment`.
        """
        if self._problems:
            listed = "; ".join(f"{name} {text}" for name, text in self._problems.items())
            raise PermanentError(
                Reason.BAD_ENVIRONMENT, f"{listed}: set them in the environment or in .env (see .env.example)"
            )


def refusals(error: ValidationError) -> Iterable[tuple[str, str]]:
    """Where and why pydantic refused something, without the value itself, which may be a secret."""
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in item["loc"])
        yield place, f"is refused: {item['msg'].removeprefix('Value error, ')}"
