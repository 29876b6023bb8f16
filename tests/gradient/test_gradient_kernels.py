"""The compiled kernels against the definitions: the same bytes, for every shape, in any order, on any thread count."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gradient_cases as cases
import pytest
import torch

from templar.gradient import aggregate, kernels
from templar.gradient.aggregate import compile_kernels, outer_step
from templar.gradient.codec.wire import Payload, decode, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.kernels import bit_planes, combine, error_feedback, machine
from templar.gradient.kernels.machine import cache_folder
from templar.gradient.layout import Layout
from tests.support.threads import threads

IMPLEMENTATIONS: tuple[kernels.Backend, ...] = ("torch", "numba")
LARGE = {"matrix": (128, 192), "odd": (65, 39), "vector": (320,), "prime": (97,), "stack": (2, 3, 64)}
RULE = FeedbackRule("sparseloco", decay=0.9, learning_rate=0.3)
each_way = pytest.mark.parametrize(
    ("recipe", "use_dct"), [(name, dct) for name in cases.RECIPES for dct in (False, True)]
)


@pytest.fixture(autouse=True, scope="module")
def _threads_for_small_tensors():
    """Tensors of these tests would be too small for a second thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "LEAST_VALUES", 1)
        yield


def update_of(layout, seed):
    """Many octaves, ties, zeros of both signs, silent chunks and tiny ones; sometimes near an end of the range."""
    size = (1.0, 1.0, 1e-6, 1e-12, 1e4)[seed % 5]
    update = {name: tensor * size for name, tensor in cases.random_update(layout, seed).items()}
    for tensor in update.values():
        flat = tensor.view(-1)
        flat[: len(flat) // 4] *= 0 if seed % 3 == 0 else 1e-9
    return update


def run(layout, seed, calls=2):
    """Compress some updates, one after the other."""
    rule = FeedbackRule(layout.recipe, decay=0.9, learning_rate=0.7)
    state, found = FeedbackState.zeros(layout), []
    for call in range(calls):
        found.append(compress(state, update_of(layout, seed + call), layout=layout, rule=rule))
        state = found[-1].state
    return found


def payload(layout, seed):
    return Payload.of(cases.header_of(layout, seed), run(layout, seed, calls=1)[0].tensors, layout)


def both_implementations(layout, seed):
    """Error feedback, bytes, and reading them back."""
    with kernels.forced("torch"), threads(3):
        expected, published = run(layout, seed), payload(layout, seed)
        data = encode(published, layout)
    for count in (1, 2):
        with kernels.forced("numba"), threads(count):
            found = run(layout, seed)
            assert encode(payload(layout, seed), layout) == data
            assert decode(data, layout) == published
        for one, other in zip(found, expected, strict=True):
            assert one.tensors == other.tensors
            assert one.state.num_calls == other.state.num_calls
            assert cases.same_bits(dict(one.state.buffers), dict(other.state.buffers))


@each_way
def test_compression_of_large_chunks(recipe, *, use_dct):
    for k in (1, 64, 4096):
        both_implementations(Layout.of(LARGE, cases.settings_of(64, k, use_dct=use_dct), recipe), seed=k)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_compression_of_updates_of_other_types_transposed_and_in_a_graph(kind):
    layout, found = cases.layout_of({"p": (192, 128)}, cases.settings_of(64, 64)), []
    update = cases.random_update(cases.layout_of({"p": (128, 192)}, cases.settings_of(64, 64)), 3)["p"].T.to(kind)
    for name in IMPLEMENTATIONS:
        with kernels.forced(name):
            made = {"p": update.clone().requires_grad_()}
            found.append(compress(FeedbackState.zeros(layout), made, layout=layout, rule=RULE))
            Payload.of(cases.header_of(layout), found[-1].tensors, layout)
    assert found[0].tensors == found[1].tensors
    assert cases.same_bits(dict(found[0].state.buffers), dict(found[1].state.buffers))


@each_way
def test_aggregates_of_large_chunks_to_parameters(recipe, *, use_dct):
    layout = Layout.of(LARGE, cases.settings_of(64, 64, use_dct=use_dct), recipe)
    payloads, after = [payload(layout, seed) for seed in range(4)], []
    for name, count in (("torch", 1), ("numba", 1), ("numba", 3)):
        params, order = cases.random_update(layout, 99), payloads if count == 1 else payloads[::-1]
        with kernels.forced(name), threads(count):
            outer_step(params, aggregate.aggregate(order, layout), learning_rate=0.7, weight_decay=0.1)
        after.append(params)
    assert all(cases.same_bits(after[0], other) for other in after[1:])


def test_slabs_of_a_large_transform_make_one_update(monkeypatch):
    layout = cases.layout_of({"p": (64, 96)}, cases.settings_of(16, 8, use_dct=True), "demo")
    payloads = [payload(layout, seed) for seed in range(3)]
    with kernels.forced("torch"):
        expected = aggregate.aggregate(payloads, layout)
    monkeypatch.setattr(combine, "_SLAB_ELEMENTS", 5 * 256)
    with kernels.forced("numba"), threads(2):
        assert cases.same_bits(aggregate.aggregate(payloads, layout), expected)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_update_is_not_written_over_tensors_of_other_shapes(name):
    """A kernel would write beyond them."""
    layout = cases.layout_of({"p": (64, 64)}, cases.settings_of(16, 8))
    published = payload(layout, 1)
    with kernels.forced(name), pytest.raises(ValueError, match="out must have exactly the tensors"):
        aggregate.aggregate([published], layout, out={"p": torch.zeros(8, 64)})


def test_a_large_model_uses_every_kernel_unforced(monkeypatch):
    used: list[str] = []
    names = {error_feedback: "compress_tensor", bit_planes: "encode_indices", combine: "combine"}
    for module, name in (*names.items(), (bit_planes, "indices_fit")):
        monkeypatch.setattr(module, name, spy(getattr(module, name), used))
    monkeypatch.setattr(kernels, "MIN_ELEMENTS", 64 * 64)
    layout = cases.layout_of({"matrix": (64, 64)}, cases.settings_of(64, 64))
    aggregate.aggregate([decode(encode(payload(layout, 4), layout), layout)], layout)
    assert used == ["compress_tensor", "encode_indices", "indices_fit", "combine"]
    with kernels.forced("torch"):
        aggregate.aggregate([payload(layout, 4)], layout)
    assert len(used) == 4


def spy(function, used):
    def called(*arguments, **options):
        used.append(function.__name__)
        return function(*arguments, **options)

    return called


def test_small_models_compile_nothing(monkeypatch):
    monkeypatch.setattr(aggregate, "compress", None)
    compile_kernels(cases.layout_of())


@pytest.mark.parametrize("recipe", cases.RECIPES)
def test_large_models_compile_the_kernels_of_a_window(recipe, monkeypatch):
    monkeypatch.setattr(kernels, "MIN_ELEMENTS", 1)
    compile_kernels(cases.layout_of(gradient=cases.settings_of(use_dct=recipe == "demo"), recipe=recipe))
    step = combine._combine if recipe == "sparseloco" else combine._means
    written = error_feedback._compress, error_feedback._keep_whole, bit_planes._encode
    assert all(kernel.signatures for kernel in (*written, bit_planes._largest_index, step))


@pytest.mark.slow
def test_compiled_code_lies_where_the_operator_says_and_otherwise_in_memory(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    folder = cache_folder()
    assert folder is not None
    assert folder.parent == tmp_path / "chosen"
    assert not list(folder.iterdir())
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))  # a folder that cannot be made, also by root
    assert cache_folder() is None
    command = [sys.executable, "-c", "from templar.gradient.kernels.combine import *"]
    subprocess.run(command, check=True, capture_output=True)  # numba cannot cache, and is not asked to


FOLDER = "import numba, templar.gradient.kernels.machine; print(numba.config.CACHE_DIR)"


@pytest.mark.slow
def test_compiled_code_belongs_to_one_state_of_the_source(tmp_path):
    """Kernels are compiled with constants of other modules, whose changes numba does not notice."""
    package = tmp_path / "templar"
    shutil.copytree(Path(kernels.__file__).parents[2], package)

    def cache_folder():
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", FOLDER], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    first = cache_folder()
    assert Path(first).is_relative_to(package / "gradient" / "kernels" / "__pycache__")
    assert cache_folder() == first
    values = package / "gradient" / "codec" / "values.py"
    values.write_text(values.read_text().replace("QUANTUM = 2.0**-44", "QUANTUM = 2.0**-43"))
    assert cache_folder() != first
