"""Checkpoints for tests: fetched without a reader of their files, and published with files of a hostile validator."""

from templar.agreement.checkpoint import fetched_checkpoint, publish_checkpoint
from templar.agreement.model_folder import write_model


def fetch_checkpoint(*args, **options):
    """The manifest of a checkpoint that `fetched_checkpoint` fetches and nobody reads."""
    with fetched_checkpoint(*args, **options) as manifest:
        return manifest


def publish_with(network, node, files):
    """Publish a checkpoint of a node's own state, with these files in it; it takes the place of an older one."""
    folder, mark = network.world.root / "with", node.state.mark
    write_model(folder, node.state.params, network.hparams.model, node.workload.tokenizer)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    network.bucket(node).delete(network.objects(node, f"checkpoint-{mark.window}-"))
    publish_folder(node, folder, mark)
    for name in files:
        (folder / name).unlink()


def publish_folder(node, folder, mark):
    publish_checkpoint(
        node.buckets.own,
        folder,
        mark,
        network=node.exchange.network,
        uid=node.exchange.identity(mark.window).uid,
        signer=node.exchange.own_signer,
        clock=node.chain.clock,
    )
