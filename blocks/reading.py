"""Reading environment variables so that every problem is reported at once, by name."""

from collections.abc import Mapping
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
        self._problems: list[str] = []

    def text(self, name: str, default: str | None = None) -> str:
        """A variable; an empty one counts as missing. A missing one without a default is a problem."""
        value = self._environment.get(name, "").strip() or default
        if value is None:
            self._problems.append(f"{name} is missing")
            return ""
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A variable that must be a number."""
        value = self.text(name, None if default is None else str(default))
        try:
            return float(value)
        except ValueError:
            if value:
                self._problems.append(f"{name} is {value!r}, which is not a number")
            return 0.0

    def problem(self, text: str) -> None:
        """Note something else that is wrong."""
        self._problems.append(text)

    def build(self, block_type: type[B], **fields: Any) -> B:
        """Make a block of what was read; what its fields refuse is noted, and the block is made unchecked."""
        try:
            return block_type(**fields)
        except ValidationError as error:
            if not self._problems:  # an empty value that was missing is reported already
                self._problems += [f"{block_type.__name__}.{item['loc'][0]}: {item['msg']}" for item in error.errors()]
            return block_type.model_construct(**fields)

    def raise_problems(self) -> None:
        """Raise everything that was noted.

        Raises:
            PermanentError: `bad_environment`.
        """
        if self._problems:
            raise PermanentError(
                Reason.BAD_ENVIRONMENT,
                "; ".join(self._problems) + ": set them in the environment or in .env (see .env.example)",
            )
