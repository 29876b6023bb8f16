"""Make the network's page: its curves, miners and newest windows, for a browser.

    templar page [--file index.html] [--env-file .env]

It is stored as `index.html` in the bucket of `R2_PAGE_*` in the environment, or else in that of the neuron `--neuron`;
an aggregator does so every hour. With `--env-file` neither neuron nor server is needed, only that bucket. With `--file`
it is written to a file instead, for a web server of your own.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from blocks.buckets import open_for_reading
from blocks.env_file import read_environment
from deployments.options import command_parser
from deployments.reading import neuron_block, open_network
from tasks.evidence import page_of, page_store
from templar.reports.public_page import PAGE_KEY
from templar.store.files import replacing


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, make the page, say where it is."""
    parser = command_parser("templar page", __doc__, "--neuron", "--env-file")
    parser.add_argument("--file", type=Path, metavar="FILE", help="write it here, and store nothing")
    arguments = parser.parse_args(words)
    if arguments.file is not None:
        config = open_network(arguments).config
        with closing(config.buckets), replacing(arguments.file) as file:
            file.write(page_of(config))
        print(f"{arguments.file}: the network's page")
        return 0
    environment = read_environment(arguments.env_file)
    if arguments.env_file is None:
        block = neuron_block(name := arguments.neuron or "default")
        config = block.config(name)
        store = page_store(block, config, environment)
    else:
        store, config = open_for_reading("page", environment), open_network(arguments).config
    with closing(config.buckets):
        store.put(PAGE_KEY, page_of(config))
    print(f"{PAGE_KEY} in bucket {store.name}: the network's page; let anybody read this object")
    return 0
