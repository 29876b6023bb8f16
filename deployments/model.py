"""Take the trained model: `templar model fetch|generate|evaluate|export|verify`.

No wallet, bucket or running neuron is needed. `--env-file` says where the network is, or `--neuron` the block of a
neuron of this host; without either it is the local network in `.templar/local` if `make run` or `make up` left one, and
otherwise the block `default`. A checkpoint is taken only if a quorum of stake proved its state, and kept in the folder
`model` of `TEMPLAR_HOME`. `--from s3://BUCKET/FOLDER` takes a copy of one from any bucket, which is not trusted;
the key is that of `R2_MODEL_READ_*`. `export --push` sends it to the Hugging Face Hub with the token in `HF_TOKEN`.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from blocks.buckets import open_folder
from blocks.env_file import read_environment
from deployments.command import exit_status
from deployments.hub import TOKEN, open_pusher, push_model
from deployments.options import add_shared, command_parser
from deployments.reading import open_network
from tasks.observing import PublicNetwork
from templar.agreement.model_folder import CARD_FILE, read_weights
from templar.agreement.proven_state import KeptModel, fetch_copied_model, fetch_model, newest_proven_window
from templar.arguments import folder_path, positive, whole_number
from templar.audit.replay import begin_at, replay_to
from templar.data.tokenizer import load_tokenizer
from templar.errors import PermanentError, Reason, TransientError
from templar.housekeeping.maintenance import origin_of_text
from templar.neuron.node import Node
from templar.reports.model_card import PICTURE_FILE, TrainingHistory, model_card, read_history
from templar.reports.text_score import run_tasks, score_texts
from templar.reports.training_curve import draw_held_out
from templar.store.files import local_file, replacing
from templar.training.model import build_model, load_parameters

FOLDER, VERIFY_FOLDER = "model", "verify"
"""In the neuron's folder, or that of the environment: fetched models, and the state of a replay."""
DONE, DIFFERS, FAILED = 0, 1, 2


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says; 0 if it was done, 1 if a replay differs, 2 if it failed."""
    arguments = _parser().parse_args(words)
    commands = {"fetch": fetch, "generate": generate, "evaluate": evaluate, "export": export, "verify": verify}
    network = open_network(arguments, FOLDER)
    with closing(network.config.buckets):
        return commands[arguments.command](arguments, network)


def fetched(arguments: argparse.Namespace, network: PublicNetwork) -> KeptModel:
    """The checkpoint that is asked for, verified and on this disk; a line on stderr says which one it is."""
    config = network.config
    birth = config.birth()
    exchange = config.reading(birth)
    if arguments.source is None:
        kept = fetch_model(exchange, birth, config.home, window=arguments.window)
    elif arguments.window is not None:
        raise PermanentError(Reason.BAD_PARAMETERS, "--window, --from: a bucket's folder has one window: leave one out")
    else:
        copied = open_folder(arguments.source, read_environment(arguments.env_file), "model")
        kept = fetch_copied_model(exchange, birth, config.home, *copied)
    print(f"model of window {kept.window}, {kept.outer_steps} outer steps, root {kept.root}", file=sys.stderr)
    return kept


def illustrated(arguments: argparse.Namespace, network: PublicNetwork) -> KeptModel:
    """As `fetched`, with a model card and its drawing that are made here from public records.

    Those of the publisher are not taken: `export --push` shows them under the operator's own account.
    """
    kept, config = fetched(arguments, network), network.config
    birth = config.birth()
    try:
        history = read_history(config.reading(birth), birth, kept.window)
    except TransientError as error:
        print(f"the model card has no history: {error}", file=sys.stderr)
        history = TrainingHistory(range(kept.window, kept.window + 1), {}, {})
    made = dict[str, bytes]()
    # A genesis has none, unless an earlier release kept its publisher's.
    if kept.window != birth.mark.window or (kept.folder / CARD_FILE).exists():
        origin = origin_of_text(config, config.hparams.data)
        made[CARD_FILE] = model_card(config.hparams, network.preset, birth, kept, history, origin=origin).encode()
    if history.held_out:
        made[PICTURE_FILE] = draw_held_out(history.held_out)
    for name, data in made.items():
        with replacing(kept.folder / name) as file:
            file.write(data)
    return kept


def fetch(arguments: argparse.Namespace, network: PublicNetwork) -> int:
    """Fetch a checkpoint and print its folder."""
    print(illustrated(arguments, network).folder)
    return DONE


def export(arguments: argparse.Namespace, network: PublicNetwork) -> int:
    """Fetch a checkpoint; copy it into a new or empty folder, push it to a repository of the Hub, or both."""
    # 1. What can be refused before anything is fetched.
    target: Path | None = arguments.folder
    if target is None and arguments.push is None:
        raise PermanentError(Reason.BAD_PARAMETERS, "export: name a folder, or a repository with --push")
    if target is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PermanentError(Reason.BAD_PARAMETERS, f"{target}: it is not an empty folder: name a new one")
    hub = open_pusher(read_environment(arguments.env_file).get(TOKEN)) if arguments.push is not None else None

    # 2. The folder comes last: after a failed push the same call is right.
    kept = illustrated(arguments, network)
    if hub is not None:
        what = f"Window {kept.window}, {kept.outer_steps} outer steps, root {kept.root}"
        print(push_model(hub, arguments.push, kept.folder, what))
    if target is not None:
        with local_file(target):  # the copy appears whole
            part = target.with_name(f"{target.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(kept.folder, part)
            part.rename(target)
        print(target)
    return DONE


def generate(arguments: argparse.Namespace, network: PublicNetwork) -> int:
    """Print the prompt and the text that the model goes on with; `bad_parameters` if the prompt fills its context."""
    folder = fetched(arguments, network).folder
    import torch  # noqa: PLC0415 - takes seconds, and the checks before it none
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(arguments.prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    room = model.config.max_position_embeddings - len(ids)
    if room < 1:
        problem = f"--prompt has {len(ids)} tokens, and the model's context {len(ids) + room}: shorten it"
        raise PermanentError(Reason.BAD_PARAMETERS, problem)
    torch.manual_seed(arguments.seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if arguments.temperature > 0:
        sampling = {"do_sample": True, "temperature": arguments.temperature}
    inputs = torch.tensor([ids])
    with torch.no_grad():
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(arguments.tokens, room),
            streamer=TextStreamer(tokenizer, skip_special_tokens=True),
            **sampling,
        )
    return DONE


def evaluate(arguments: argparse.Namespace, network: PublicNetwork) -> int:
    """Print the model's loss, perplexity and bits per byte on held-out text, and its results in lm-eval's tasks."""
    folder, config = fetched(arguments, network).folder, network.config
    tokenizer, hparams = load_tokenizer(str(folder)), config.hparams
    if arguments.tasks:
        tasks = arguments.tasks.split(",")
        for task, metric, value in run_tasks(folder, tasks, config.trainer, include=arguments.include):
            print(f"{task}  {metric}  {value:.6f}")
        return DONE
    texts = network.dataset.held_out_texts(hparams, config.home, tokenizer, arguments.texts)
    net = build_model(hparams.model)
    load_parameters(net, read_weights(folder, hparams.model))
    score = score_texts(net, tokenizer, texts, hparams.model.max_position_embeddings)
    print(f"held-out texts  {score.texts}")
    print(f"tokens          {score.tokens}")
    print(f"loss            {score.loss:.6f} nats per token")
    print(f"perplexity      {score.perplexity:.4f} per token")
    print(f"bits per byte   {score.bits_per_byte:.6f}")
    return DONE


def verify(arguments: argparse.Namespace, network: PublicNetwork) -> int:
    """Replay the windows and print a line for each; 1 if a root differs, 2 if the last one is not proven."""
    home = network.config.home.with_name(VERIFY_FOLDER)
    shutil.rmtree(home, ignore_errors=True)  # a replay that begins anew trusts nothing of an earlier one
    node = Node(replace(network.config, name=VERIFY_FOLDER, home=home))
    try:
        first = node.state.window if arguments.first is None else arguments.first
        last = newest_proven_window(node.exchange) if arguments.window is None else arguments.window
        if last is None:
            raise PermanentError(Reason.OBJECT_MISSING, "no window has a proven state yet: wait until one was settled")
        begin_at(node, first)
        replayed = None
        for replayed in replay_to(node, last):
            found = "as a quorum proved" if replayed.agrees else "not proven by a quorum"
            if replayed.proven is not None and not replayed.agrees:
                found = f"DIFFERS: a quorum proved {replayed.proven}"
            print(f"window {replayed.window}: uids {list(replayed.uids)}, root {replayed.root}, {found}")
            if replayed.proven is not None and not replayed.agrees:
                return DIFFERS
    finally:
        node.stop()
        shutil.rmtree(home, ignore_errors=True)
    if replayed is None or not replayed.agrees:
        print("the last window's root is not proven by a quorum: choose an earlier --window", file=sys.stderr)
        return FAILED
    begun = "the genesis" if arguments.first is None else f"the checkpoint of window {first}"
    print(f"verified: from {begun} to window {replayed.window}")
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("templar model", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    add_shared(common, "--neuron", "--env-file")
    common.add_argument("--window", type=whole_number(0), metavar="W", help="of this window; the newest by default")

    taking = argparse.ArgumentParser(add_help=False, parents=[common])
    taking.add_argument("--from", dest="source", metavar="s3://BUCKET/FOLDER", help="of a copy in any bucket")
    commands.add_parser("fetch", parents=[taking], help="fetch and verify a checkpoint, and print its folder")
    generating = commands.add_parser("generate", parents=[taking], help="go on with a text")
    generating.add_argument("--prompt", required=True, help="the beginning of the text")
    generating.add_argument("--tokens", type=whole_number(1), default=64, help="new tokens at most")
    generating.add_argument("--temperature", type=_temperature, default=0.8, help="0 always takes the likeliest token")
    generating.add_argument("--seed", type=whole_number(0), default=0, help="another seed gives another text")
    evaluating = commands.add_parser("evaluate", parents=[taking], help="measure it on held-out text")
    evaluating.add_argument("--texts", type=whole_number(1), default=256, help="held-out texts at most")
    evaluating.add_argument("--tasks", help="tasks of lm-evaluation-harness instead, with commas between them")
    evaluating.add_argument("--include", type=Path, metavar="DIR", help="a folder with tasks of your own")
    exporting = commands.add_parser("export", parents=[taking], help="copy it into a folder for other programs")
    exporting.add_argument("folder", type=folder_path, nargs="?", metavar="DIR", help="a new folder")
    exporting.add_argument("--push", metavar="USER/NAME", help="push it to this repository of the Hugging Face Hub")
    verifying = commands.add_parser("verify", parents=[common], help="replay it from public objects")
    verifying.add_argument("--first", type=whole_number(0), metavar="W", help="begin with the checkpoint of window W")
    return parser


def _temperature(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else positive(text)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(exit_status(main))
