import pytest

from templar.housekeeping.maintenance import publish_newest_checkpoint
from tests.support.network import Network, tiny


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Network:
    """Six windows of a network that keeps three, and checkpoints of windows 2, 4 and 6."""
    storage = {"checkpoint_frequency": 2, "checkpoints_kept": 1, "retention_windows": 3}
    old_network = Network(tmp_path_factory.mktemp("old"), tiny(storage=storage))
    for window in (2, 4, 6):
        old_network.run([window - 1, window])
        publish_newest_checkpoint(old_network.config("aggregator-1"))
    return old_network
