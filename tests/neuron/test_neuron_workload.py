"""What a preview shows is what the miner trains on."""

from templar.errors import PermanentError, Reason
from templar.neuron.workload import preview
from templar.window import open_window
from tests.support.errors import raising


def test_a_preview_is_what_the_miner_trains_on(network):
    miner = network.miners[0]
    open_window(miner, 1)
    report = miner.fetch_pages(1)
    own = miner.exchange.identity(1).uid
    found = preview(network.observer().workload, 1, own, num_texts=3)
    assert (found.window, found.uid, found.digest) == (1, own, report.assignment)
    assert found.num_sequences == report.num_sequences
    assert tuple(page.index for page in found.pages) == report.units
    rows = miner.hparams.data.rows_per_page
    pages = miner.workload.dataset.pages
    for page in found.pages:
        text = pages.read_page(page.index)
        assert (page.source, page.first_row, page.num_rows) == (text.config, text.first_row, rows)
        assert page.num_characters == sum(map(len, text.texts))
    trained = miner._training_sequences(1)
    assert found.texts == tuple(miner.workload.tokenizer.decode(row) for row in trained[:3].tolist())
    assert all(found.texts)
    nobody = preview(miner.workload, 1, 200, num_texts=3)
    assert (nobody.pages, nobody.num_sequences, nobody.texts) == ((), 0, ()), "without a slot it is empty"
    with raising(PermanentError, Reason.WINDOW_PASSED, match="began with window 1"):
        preview(miner.workload, 0, 3, num_texts=3)
