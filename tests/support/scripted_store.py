"""An object store that passes calls on to another one, with hooks for failures."""

from collections.abc import Callable

from lab.adversary.faults import FaultyStore, passed_on

Hook = Callable[[str, str], None]


class ScriptedStore(FaultyStore):
    """The objects of another store.

    An error that `before` raises replaces the call; one that `after` raises replaces the answer, as if that was lost.
    """

    def __init__(self, inner):
        super().__init__(inner)
        self.inner = inner
        self.calls: list[tuple[str, str]] = []  # operation and key of every call, in order, failed ones too
        self.after: Hook = lambda operation, key: None
        self.ignores_conditions = False  # `put_if_absent` overwrites, as on servers without conditional writes
        self.closed = 0

    get_file = passed_on("get_file")

    def count(self, operation, key=""):
        return sum(1 for call in self.calls if call[0] == operation and key in ("", call[1]))

    def put_if_absent(self, key, data):
        def put():
            if self.ignores_conditions:
                self.inner.put(key, data)
                return True
            return self.inner.put_if_absent(key, data)

        return self.answer("put_if_absent", key, put)

    def close(self):
        self.closed += 1
        super().close()

    def answer(self, operation, key, work):
        self.calls.append((operation, key))
        self.before(operation, key)
        answer = work()
        self.after(operation, key)
        return answer


def failing(error, *operations, times=None, key=""):
    """A hook that raises an error: in these operations (all by default), on this key, this many times."""
    left = [times]

    def hook(operation, called):
        if (operations and operation not in operations) or (key and called != key) or left[0] == 0:
            return
        if left[0] is not None:
            left[0] -= 1
        raise error

    return hook


def fail_once(store, error, *operations, key="", lost=False):
    """Let one call fail; if its answer is `lost`, it has done its work all the same."""
    setattr(store, "after" if lost else "before", failing(error, *operations, key=key, times=1))


def once(operation, key, action):
    """A hook that acts once, before the first call of an operation on a key, like a faster process."""
    pending = [action]

    def hook(called, called_key):
        if (called, called_key) == (operation, key) and pending:
            pending.pop()()

    return hook
