"""A local network without a process: all that `deployments.local` prepares, around a few lines of text.

Its neurons are blocks, as an operator's are. `at` puts one on simulated time, so that its windows do not wait.
"""

import json

from dotenv import dotenv_values

from blocks.environment import neuron_from_environment
from deployments.local.plan import LocalPlan
from deployments.local.prepare import (
    announce_bucket,
    prepare_buckets,
    prepare_chain,
    prepare_folder,
    publish_network,
    write_environments,
)
from deployments.processes import PROJECT_ROOT
from templar.chain.ledger import Ledger
from templar.data.shards.shard_writer import build_shards
from templar.datasets.page_writer import build_dataset
from templar.hparams import load_hparams
from templar.store.directory import DirectoryStore
from templar.timeline import first_block
from tests.support.datasets import numbered_documents
from tests.support.network import TINY

PRESET = "test"


def write_hparams(path, **sections):
    """Write the project's presets and one more, `test`: `local` with a model that trains in milliseconds."""
    presets = json.loads((PROJECT_ROOT / "hparams.json").read_text(encoding="utf-8"))
    changes = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**presets, PRESET: {"extends": "local", **changes}}), encoding="utf-8")
    return path


class PreparedNetwork:
    """Chain, buckets in a folder, text, environments and genesis; `sections` are what differs from the preset.

    The first honest miner is called `default`, and each bad actor like what it does. A validator named `deciding` has
    a quorum of the stake by itself; without one the aggregator has.
    """

    def __init__(self, folder, *, num_honest=0, actors=("lazy",), deciding=None, **sections):
        self.plan = LocalPlan(
            folder=folder / "network",
            preset=PRESET,
            num_honest=num_honest,
            bad_actors=actors,
            directory_store=True,
            hparams_path=write_hparams(folder / "hparams.json", **sections),
        )
        self.hparams = load_hparams(PRESET, path=self.plan.hparams_path)
        prepare_folder(self.plan)
        prepare_chain(self.plan, self.hparams)
        documents = [
            *numbered_documents("alpha", num_documents=12, num_lines=40),
            *numbered_documents("beta", num_documents=12, num_lines=40),
        ]
        data, vocab_size = self.hparams.data, self.hparams.model.vocab_size
        if data.layout == "pages":
            build_dataset(documents, self.plan.dataset, vocab_size=vocab_size, row_chars=80)
        else:
            build_shards(
                documents,
                self.plan.dataset,
                vocab_size=vocab_size,
                sequence_length=data.sequence_length,
                samples_per_shard=60,
                block_bytes=512,
            )
        write_environments(self.plan, prepare_buckets(self.plan))
        if deciding is not None:
            self._give_stake(deciding)
        for neuron in self.plan.running:
            announce_bucket(self.block(neuron.name))
        birth = publish_network(self.plan, self.block("aggregator"), opens_in_seconds=0)
        self.first_window = birth.start.start_window

    def _give_stake(self, deciding):
        """Leave the other validators no more stake than they need to be validators."""
        ledger = Ledger(self.plan.ledger)
        for name in {"aggregator", "validator"} - {deciding}:
            ledger.set_stake(self.block(name).wallet.open().address, self.hparams.peers.validator_min_stake)
        ledger.close()

    def forget(self, founder):
        """Empty the bucket of the member that started the network, so that there is none yet."""
        store = DirectoryStore(self.bucket(founder))
        store.delete([info.key for info in store.list()])
        return self

    def environment(self, name):
        values = dotenv_values(self.plan.folder / "env" / f"{name}.env")
        return {variable: value for variable, value in values.items() if value is not None}

    def environment_on(self, url, account, read, write):
        """That of the lazy miner, whose buckets are one on an endpoint; the dataset is in its own."""
        values = self.environment("lazy") | {"TEMPLAR_STORAGE": url}
        for name in ("GRADIENTS", "DATASET"):
            values |= dict.fromkeys((f"R2_{name}_ACCOUNT_ID", f"R2_{name}_BUCKET_NAME"), account)
        for name, key in (("GRADIENTS_READ", read), ("GRADIENTS_WRITE", write), ("DATASET_READ", read)):
            values[f"R2_{name}_ACCESS_KEY_ID"] = key.access_key_id
            values[f"R2_{name}_SECRET_ACCESS_KEY"] = key.secret_access_key
        return values

    def block(self, name):
        return neuron_from_environment(self.environment(name))

    def at(self, name, window):
        """A neuron's block with a clock of its own, simulated, that starts when a window opens."""
        block = self.block(name)
        ledger = Ledger(self.plan.ledger)
        start = ledger._parameters.time(first_block(window, self.hparams.windows))
        ledger.close()
        subnet = block.subnet.model_copy(update={"network": f"ledger:{self.plan.ledger}?clock={start}"})
        return block.model_copy(update={"subnet": subnet})

    def bucket(self, name):
        account = next(neuron.account_id for neuron in self.plan.neurons if neuron.name == name)
        return self.plan.folder / "buckets" / account
