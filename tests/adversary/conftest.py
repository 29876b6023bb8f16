from tests.support.memory import folder

__all__ = ["folder"]
