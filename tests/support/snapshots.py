"""States that a test can tell apart, and their snapshots."""

from dataclasses import replace

import torch

from templar.agreement.state import StateMark, parameters_digest, state_root
from templar.exchange.signed import Network
from templar.gradient.compress import FeedbackState
from templar.gradient.layout import Layout
from templar.hparams import load_hparams
from templar.neuron.private_state import PrivateFolder, PrivateState, ProgressFile, shapes_of, write_private
from templar.neuron.snapshot import Snapshots
from templar.training.model import parameter_shapes
from templar.training.optimizers import OptimizerState
from templar.training.train import StepState

HPARAMS = load_hparams("simulation")
NETWORK = Network(1, "a" * 64)
SHAPES = parameter_shapes(HPARAMS.model)
LAYOUT = Layout.of(SHAPES, HPARAMS.gradient, HPARAMS.training.recipe)
PREVIOUS = "b" * 64
DIGEST = "d" * 64
KEPT = 2


def parameters(number):
    """Parameters of the tiny model that are all this number."""
    return {name: torch.full(shape, float(number)) for name, shape in SHAPES.items()}


def private(number):
    """Private state that is all this number."""
    zeros = FeedbackState.zeros(LAYOUT)
    buffers = {name: torch.full_like(tensor, number) for name, tensor in zeros.buffers.items()}
    steps = int(number)
    return PrivateState(
        FeedbackState(buffers, steps), OptimizerState(steps, parameters(number + 1), parameters(number + 2))
    )


def save_private(state, path):
    """Write a private state to one file."""
    buffers = state.feedback.buffers
    write_private(path, buffers.items(), shapes_of(buffers), state.feedback.num_calls, state.optimizer)


def mark(window, params=None):
    """The mark of the state of a window, one outer step per window."""
    digest = parameters_digest(parameters(window) if params is None else params)
    unrooted = StateMark(window, outer_steps=window, root="", previous_root=PREVIOUS, null=False)
    return replace(unrooted, root=state_root(unrooted, digest))


def snapshots(folder):
    return Snapshots(folder / "snapshots", NETWORK, kept=KEPT)


def write_snapshot(store, params, mark, own):
    """Write a snapshot, and wait for it."""
    store.begin(params, mark, own)
    store.wait()


def private_file(folder, number):
    """A file of private state, beside the folder of the snapshots."""
    path = folder / "private" / f"{number}.safetensors"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        save_private(private(number), path)
    return path


def private_folder(folder):
    return PrivateFolder(folder / "live", durable=True)


def save(folder, window):
    write_snapshot(snapshots(folder), parameters(window), mark(window), private_file(folder, window))


def prepare(folder):
    """Two snapshots, as many as are kept, and the private state of two more."""
    for window in (1, 2):
        save(folder, window)
    for number in (3, 7):
        private_file(folder, number)


def work(folder):
    """A third one, for which the first has to go."""
    save(folder, 3)


def work_again(folder):
    """Another state of the second window takes the place of the one that is there."""
    write_snapshot(snapshots(folder), parameters(7), mark(2, parameters(7)), private_file(folder, 7))


def prepare_staged(folder):
    """A live private state, and a staged one whose payload was applied."""
    private_folder(folder).go_live(private_file(folder, 2), 2, DIGEST)
    private_file(folder, 3)


def go_live(folder):
    """The staged state goes live, and the next snapshot has it."""
    state = private_folder(folder).go_live(folder / "private" / "3.safetensors", 3, DIGEST)
    write_snapshot(snapshots(folder), parameters(3), mark(3), state.path)
    _, file = snapshots(folder).load(mark(3), HPARAMS.model)
    assert file is not None
    return private_folder(folder).take(file, 3, DIGEST)


def progress_file(folder):
    """The progress of a training, which is written after every step."""
    path = folder / "progress-1.safetensors"
    return ProgressFile(path, {"window": "1"}, SHAPES, second_moments=SHAPES, seconds=0, durable=True)


def save_progress(folder, steps=2):
    """So many steps are done."""
    folder.mkdir(exist_ok=True, parents=True)
    optimizer = OptimizerState(steps, parameters(steps), parameters(steps))
    progress_file(folder).save(StepState((float(steps),) * steps, steps, parameters(steps), optimizer))
