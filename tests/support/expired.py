"""What of a bucket has expired, for tests that look at whole listings."""

from templar.agreement.retention import Retention, survey
from templar.exchange.object_keys import parse_current_key


def expired_objects(objects, *, current_window, genesis_windows, storage):
    """The objects of a bucket whose retention is over, in the listing's order; see `Retention`."""
    listed = list(objects)
    found = survey(listed, current_window)
    retention = Retention.of(found, window=current_window, genesis_windows=genesis_windows, storage=storage)
    return [info for info in listed if (key := parse_current_key(info.key)) and retention.is_expired(key)]
