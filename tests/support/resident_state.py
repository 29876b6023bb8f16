"""Module-level state, as a loaded model is: the same object in every run of one process."""

import uuid

TOKEN = uuid.uuid4().hex
VISITS: list[str] = []
