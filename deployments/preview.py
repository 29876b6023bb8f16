"""Show what a uid trains on in a window, decoded.

    templar preview --neuron default [--window 12] [--uid 3] [--sequences 3]

The neuron's block, or its whole `.env`, names chain, buckets and dataset; nothing is written. By default it is its own
data of the window that is open now.
"""

import tempfile
import unicodedata
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from blocks.env_file import read_environment
from blocks.environment import neuron_from_environment
from deployments.neuron.status import folding_table
from deployments.options import command_parser
from deployments.reading import neuron_block
from tasks.observing import network_of
from templar.agreement.settings_plan import SettingsPlan
from templar.arguments import whole_number
from templar.errors import PermanentError, Reason
from templar.housekeeping.maintenance import known_mark
from templar.neuron.workload import Preview, open_workload, preview
from templar.timeline import window_of


def show(found: Preview, console: Console) -> None:
    """Print a preview; foreign text is printed as it is, not as markup."""
    console.print(
        f"window {found.window} (from block {found.opens_at}), uid {found.uid}, assignment {found.digest[:12]}"
    )
    if not found.pages:
        console.print("nothing: it was not registered when the window opened, or all slots were taken")
        return
    rows = (
        (page.index, page.source, f"{page.first_row} to {page.first_row + page.num_rows - 1}", page.num_characters)
        for page in found.pages
    )
    console.print(
        folding_table("page", "source", "rows", "characters", rows=rows, right=("page", "rows", "characters"))
    )
    console.print(f"{found.num_sequences} sequences; the first {len(found.texts)} in training order:")
    for number, text in enumerate(found.texts):
        console.rule(str(number))
        # Control characters might be obeyed by the terminal.
        is_harmless = (each in "\n\t" or unicodedata.category(each)[0] != "C" for each in text)
        shown = (each if good else "\ufffd" for each, good in zip(text, is_harmless, strict=True))
        console.print(Text("".join(shown)))


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line; 0 if there was something to show."""
    parser = command_parser("templar preview", __doc__, "--neuron", "--env-file")
    parser.add_argument("--window", type=whole_number(0), help="the window; by default the one that is open")
    parser.add_argument("--uid", type=whole_number(0), help="the miner; by default the neuron itself")
    parser.add_argument("--sequences", type=whole_number(0), default=3, help="sequences to decode")
    arguments = parser.parse_args(words)
    name, uid, number = arguments.neuron or "default", arguments.uid, arguments.window
    if arguments.env_file is not None:
        block = neuron_from_environment(read_environment(arguments.env_file))
    else:
        block = neuron_block(name)
    chain = block.subnet.open(block.wallet)
    if uid is None:
        own = chain.metagraph().by_hotkey(block.wallet.open().address)
        if own is None:
            raise PermanentError(Reason.NOT_REGISTERED, f"neuron {name!r} has no uid on its subnet: name one, --uid")
        uid = own.uid
    with tempfile.TemporaryDirectory(prefix="templar-preview-") as folder:
        config = network_of(block.model_copy(update={"home": folder})).config
        birth, hparams = config.birth(), config.hparams
        workload = open_workload(config, birth)
        mark = known_mark(block.config(name), birth)
        if hparams.data.layout == "shards":
            workload.follow(mark.epochs, mark.window)
        if number is None:
            number = window_of(chain.block(), hparams.windows)
        workload.use(SettingsPlan(hparams, mark.plan).at(number))
        show(preview(workload, number, uid, num_texts=arguments.sequences), Console())
    return 0
