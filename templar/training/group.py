"""The processes that train one model together: one alone, replicas (plain data parallel), or shards (FSDP2).

On several hosts the ranks of each host share a whole model (hybrid sharding), unless each host has one rank only.

Rank r of n takes the sequences of each batch at the places r, r + n, ..., and every rank computes the same number of
micro-batches: no rank ever waits for one with less data. Gradients and losses are means over the whole batch. What is
decided is decided by rank 0 for all of them, so they take the same steps. Every function below that calls a collective
is called by all ranks, in the same order.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn

from templar.hparams import Model
from templar.interrupt import StoppedError, check_stop
from templar.tensorfile import own_tensor
from templar.training.device import Device, pinned, to_host
from templar.training.memory import shards_of
from templar.training.model import LayerStep, empty_model, meta_model, named_parameters, parameter_shapes, use_rotary

BUCKET_ELEMENTS = 1 << 24  # gradients are added up over the ranks in pieces of so many elements
_STOPPED = 2  # what rank 0 tells the others instead of yes or no


class Alone:
    """One process, which asks nobody."""

    rank, size = 0, 1

    def build(self, model: Model, device: Device) -> nn.Module:
        """A model whose parameters are loaded before each training."""
        del device
        return empty_model(model)

    def load(self, param: nn.Parameter, tensors: Mapping[str, Tensor], name: str, place: torch.device) -> None:
        """Set a parameter to this rank's part of a tensor, of those of a mapping."""
        param.data = self.part(param, tensors, name, place)

    def unload(self, param: nn.Parameter) -> None:
        """Give the memory of a parameter back."""
        param.data = torch.empty(0)

    def part(self, param: nn.Parameter, tensors: Mapping[str, Tensor], name: str, place: torch.device) -> Tensor:
        """A new tensor on a device: the part of another one that this rank has of the parameter."""
        return _own(tensors, name, place)

    def whole(self, tensor: Tensor) -> Tensor:
        """All parts of a tensor, on the CPU; a tensor that is whole there is not copied."""
        return to_host(tensor)

    def layer_step(self, step: LayerStep) -> LayerStep:
        """Choose how a layer is computed."""
        return step

    def loss(self, net: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a loss with the model."""
        del net
        return compute()

    def decide(self, here: Callable[[], bool]) -> bool:
        """Whether to go on; StoppedError if a stop was asked for."""
        check_stop()
        return here()

    def mean_losses(self, losses: list[float]) -> list[float]:
        """The mean of each micro-batch's loss over the ranks."""
        return losses

    def mean_gradients(self, net: nn.Module) -> None:
        """Replace each gradient by its mean over the ranks."""

    def keep(self, tensors: Iterable[tuple[str, Tensor]]) -> Mapping[str, Tensor]:
        """The tensors of a result, which come one by one; rank 0 has them in the end."""
        return dict(tensors) if self.rank == 0 else {}


class ReplicatedGroup(Alone):
    """Each rank has the whole model; gradients are averaged after each batch."""

    def __init__(self, model: Model, hosts: int = 1) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.shards = shards_of(self.size, hosts)
        """Ranks that share one model, if it is sharded: those of a host."""
        self._shapes = parameter_shapes(model)

    def part(self, param: nn.Parameter, tensors: Mapping[str, Tensor], name: str, place: torch.device) -> Tensor:
        """As in `Alone`, from the tensors of rank 0."""
        tensor = _own(tensors, name, place) if self.rank == 0 else torch.empty(self._shapes[name], device=place)
        distributed.broadcast(tensor, src=0)
        return tensor

    def decide(self, here: Callable[[], bool]) -> bool:
        """As in `Alone`; rank 0 decides for all, and a stop of rank 0 is one of all."""
        answer = 0
        if self.rank == 0:
            try:
                answer = int(super().decide(here))
            except StoppedError:
                answer = _STOPPED
        told = torch.tensor([answer], dtype=torch.uint8)
        distributed.broadcast(told, src=0)
        if int(told) == _STOPPED:
            raise StoppedError("stopped on request, between two micro-batches of all ranks")
        return bool(told)

    def mean_losses(self, losses: list[float]) -> list[float]:
        """As in `Alone`. A loss of one rank that is not finite is so on all."""
        total = torch.tensor(losses, dtype=torch.float64)
        distributed.all_reduce(total)
        return [float(loss) / self.size for loss in total.tolist()]

    def mean_gradients(self, net: nn.Module) -> None:
        """As in `Alone`."""
        for grads in _buckets(param.grad for _, param in named_parameters(net) if param.grad is not None):
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            distributed.all_reduce(flat)
            flat /= self.size
            for grad, mean in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))


class ShardedGroup(ReplicatedGroup):
    """Each rank has a part of every tensor's first dimension; FSDP2 gathers a layer while it computes.

    With several such models on as many hosts, it averages their gradients, too.
    """

    def build(self, model: Model, device: Device) -> nn.Module:
        """As in `Alone`, sharded. Its forward pass calls a function within FSDP's hooks; so does that of each layer."""
        from torch.distributed import device_mesh, fsdp  # noqa: PLC0415 - takes a second, only for sharded ranks

        net: Any = meta_model(model)
        place, copies = device.place.type, self.size // self.shards
        if copies == 1:
            mesh = device_mesh.init_device_mesh(place, (self.shards,))
        else:
            mesh = device_mesh.init_device_mesh(place, (copies, self.shards), mesh_dim_names=("hosts", "ranks"))
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=None if device.dtype is torch.float32 else device.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # what passes from layer to layer stays float32, as on one device
        )
        for layer in net.model.layers:
            layer.forward = partial(device.layer_step, layer)
            fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy)
        net.forward = _call
        fsdp.fully_shard(net, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32))
        net.to_empty(device=device.place)
        use_rotary(net)
        return cast("nn.Module", net)

    def load(self, param: nn.Parameter, tensors: Mapping[str, Tensor], name: str, place: torch.device) -> None:
        """As in `ReplicatedGroup`; the rank keeps its part."""
        with torch.no_grad():
            _local(param).copy_(self._shard(super().part(param, tensors, name, place)))

    def unload(self, param: nn.Parameter) -> None:
        """Nothing: FSDP holds the shards as long as the rank lives."""

    def part(self, param: nn.Parameter, tensors: Mapping[str, Tensor], name: str, place: torch.device) -> Tensor:
        """As in `ReplicatedGroup`; the rank keeps its part."""
        part = torch.zeros_like(param.data)
        _local(part).copy_(self._shard(super().part(param, tensors, name, place)))
        return part

    def whole(self, tensor: Tensor) -> Tensor:
        """As in `Alone`; all ranks gather it."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - as above

        return to_host(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    def layer_step(self, step: LayerStep) -> LayerStep:
        """As in `Alone`: the layer itself, which has the step inside FSDP's hooks."""
        del step
        return _call

    def loss(self, net: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
        """As in `Alone`, within the hooks of the model."""
        loss: Tensor = net(compute)
        return loss

    def mean_gradients(self, net: nn.Module) -> None:
        """Nothing: FSDP did it in the backward pass."""

    def keep(self, tensors: Iterable[tuple[str, Tensor]]) -> Mapping[str, Tensor]:
        """As in `Alone`; to gather a tensor takes all ranks."""
        kept = super().keep(tensors)
        deque(tensors, maxlen=0)
        return kept

    def _shard(self, whole: Tensor) -> Tensor:
        chunks, number = whole.chunk(self.shards), self.rank % self.shards
        return chunks[number] if number < len(chunks) else whole[:0]


def _own(tensors: Mapping[str, Tensor], name: str, place: torch.device) -> Tensor:
    return (
        own_tensor(tensors, name, place) if place.type == "cpu" else pinned(torch.float32).to_gpu(tensors[name], place)
    )


def _call(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - as above

    if not isinstance(tensor, DTensor):
        raise TypeError("FSDP has not sharded this tensor")
    return tensor.to_local()


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket, count = list[Tensor](), 0
    for tensor in tensors:
        bucket.append(tensor)
        count += tensor.numel()
        if count >= BUCKET_ELEMENTS:
            yield bucket
            bucket, count = [], 0
    if bucket:
        yield bucket
