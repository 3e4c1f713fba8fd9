# SPDX-License-Identifier: Apache-2.0
"""The copies that a replica works on: a module's tree with tensors of its own, rows of arguments.

The tree is copied for every pass, shallowly, so a replica has the modes, hooks and attributes that
the module has now; tensors are copied once a step. Replicas have leaves of their own for what is
trained, the primary too (an alias of each parameter), so hooks of parameters see one gradient: the
sum. What has several names (tied parameters, a module in two places) is one in a replica too.

The primary has the buffers of the module themselves: what it writes into them, or puts in their
place, stays. What other replicas change in theirs is lost when the step ends, as in PyTorch; and so
is every other attribute that a forward pass sets.

Tensors of arguments are cut along one dim into the rows of each replica, as `torch.chunk` cuts, and
outputs are joined. The walk goes through PyTorch's own trees: tuples, lists, dicts, named tuples,
and classes that were registered there, as the outputs of `transformers` are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import (
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.module import (
    THREADED_BATCH,
    THREADED_MODULE,
    THREADED_OUTPUT,
    THREADED_STEP,
)
from echelon.cost.bytes.threads import replica_rows
from echelon.parallel.threads.workers import num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTensors:
    """Hold the parameters and buffers of one replica."""

    trained: Sequence[torch.Tensor]
    """Its leaf of each tensor that is trained, in the order of `trained_tensors`."""
    by_id: Mapping[int, torch.Tensor]
    """Its tensor in the place of each one of the module, by the id of that."""


def state_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module, each once."""
    found = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return list(found.values())


def trained_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters, and buffers if any, that require a gradient, each once."""
    return [one for one in state_of(module) if one.requires_grad]


class ModuleCopies:
    """Hold what the replicas of a module have in one step: copied when a replica first has rows."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        """Copy nothing yet; the module's tensors are those of now until the step has ended."""
        self._module, self._devices = module, devices
        self._found: list[ReplicaTensors] = []
        self._versions = self._versions_now()

    def _versions_now(self) -> list[tuple[int, int, int]]:
        return [
            (id(one), one.data_ptr(), 0 if one.is_inference() else one._version)
            for one in self._module.parameters()
        ]

    def require_unchanged(self) -> None:
        """Raise ConfigError where a parameter has changed since the step began."""
        if self._versions_now() != self._versions:
            message = "parameters have changed since the step began, and replicas have the old ones"
            ways = ("leave `with model.step():` before the optimizer's step",)
            raise ConfigError([THREADED_STEP.problem(message, suggestions=ways)])

    def extend(self, count: int) -> int:
        """Give parameters and buffers to the first `count` replicas; return the bytes copied now.

        Step 2 of seven.
        """
        sent = 0
        while len(self._found) < count:
            index = len(self._found)
            with torch.inference_mode(False), torch.no_grad():
                self._found.append(self._copied(index))
            sent += sum(map(num_bytes, state_of(self._module))) if index else 0
        return sent

    def _copied(self, index: int) -> ReplicaTensors:
        by_id: dict[int, torch.Tensor] = {}
        trained: list[torch.Tensor] = []
        parameters = {id(one) for one in self._module.parameters()}
        for one in state_of(self._module):
            here = one.detach()
            if index:
                here = one.detach().to(self._devices[index], copy=True, non_blocking=True)
            if id(one) in parameters:
                here = nn.Parameter(here, requires_grad=one.requires_grad)
            elif one.requires_grad:
                here.requires_grad_()
            elif not index:
                here = one
            by_id[id(one)] = here
            if one.requires_grad:
                trained.append(here)
        return ReplicaTensors(trained=trained, by_id=by_id)

    def trained(self, index: int) -> Sequence[torch.Tensor]:
        """Return the leaves of a replica, in the order of `trained_tensors`."""
        return self._found[index].trained

    def replica(self, index: int) -> list[nn.Module]:
        """Return the modules of a replica, the root first, whose tensors it has got."""
        by_id = self._found[index].by_id
        copies = {
            id(one): cast("nn.Module", one._replicate_for_data_parallel())  # type: ignore[operator]
            for one in self._module.modules()
        }
        for one in self._module.modules():
            here = copies[id(one)]
            for name, child in one._modules.items():
                here._modules[name] = None if child is None else copies[id(child)]
            for name, parameter in one._parameters.items():
                if parameter is None:
                    here.register_parameter(name, None)
                else:
                    setattr(here, name, by_id[id(parameter)])
            for name, buffer in one._buffers.items():
                if buffer is not None:
                    here._buffers[name] = by_id[id(buffer)]
        return list(copies.values())

    def keep_buffers(self, primary: Sequence[nn.Module]) -> None:
        """Put buffers that the primary replaced in this pass in the place of the module's."""
        by_id = self._found[0].by_id
        for one, here in zip(self._module.modules(), primary, strict=True):
            for name, buffer in list(one._buffers.items()):
                now = here._buffers.get(name)
                if now is not (None if buffer is None else by_id[id(buffer)]):
                    one._buffers[name] = None if now is None else now.detach()


def require_replicable(module: nn.Module, primary: torch.device) -> None:
    """Raise ConfigError with all that keeps a module from being copied for each replica."""
    problems = list(_problems(module, primary))
    if problems:
        raise ConfigError(problems)


def _problems(module: nn.Module, primary: torch.device) -> Iterator[Problem]:
    for name, one in module.named_modules():
        kind = _taken_in(one)
        if kind:
            message = f"{_called(name)} is {kind}"
            yield THREADED_MODULE.problem(message, suggestions=("the module itself, as it was",))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            message, way = f"{name} has no shape yet", "run the module once, then ec.threaded"
        elif tensor.is_meta:
            message, way = f"{name} is on the meta device and has no values", "make it on a device"
        elif tensor.device != primary:
            message = f"{name} is on {tensor.device}, and replica 0 on {primary}"
            way = f"module.to({str(primary)!r})"
        else:
            continue
        yield THREADED_MODULE.problem(message, suggestions=(way,))


def _taken_in(module: nn.Module) -> str:
    """Return what has taken a module in, so that a copy of its tree would not compute alone."""
    kind = type(module).__name__
    if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return "compiled by torch.compile, which traces one thread"
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled by TorchScript"
    if kind in {"ThreadedModule", "DataParallel", "DistributedDataParallel"}:
        return f"a {kind} already"
    if kind.startswith("FSDP") or "fully_shard" in type(module).__module__:
        return "split over ranks by FSDP"
    return ""


def _called(name: str) -> str:
    return name or "the module"


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""What may be in an output beside tensors, where all replicas give the same."""
_DEPTH = 4
"""How far an object is looked into for tensors that cannot be cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Hold the arguments of a call: their leaves, and which of these are cut, or given whole."""

    leaves: Sequence[Any]
    spec: TreeSpec
    cut: frozenset[int]
    rows: tuple[int, ...]
    """The rows of each replica that has any; one replica where nothing is cut."""
    dim: int

    def part(self, place: int, index: int) -> Any:
        """Return what replica `index` gets of a leaf, where it is; a view where it is cut."""
        leaf = self.leaves[place]
        if place not in self.cut:
            return leaf
        part = leaf.narrow(self.dim, sum(self.rows[:index]), self.rows[index])
        return part.contiguous() if self.dim else part

    @property
    def wanting(self) -> list[int]:
        """Return the places of tensors that require a gradient."""
        return [
            place
            for place, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]

    def of_replica(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments from the leaves of one replica."""
        return tree_unflatten(list(leaves), self.spec)

    @property
    def bytes_elsewhere(self) -> int:
        """Return the bytes of what replicas other than the primary get."""
        others, every = len(self.rows) - 1, sum(self.rows)
        return sum(
            num_bytes(leaf) * (every - self.rows[0]) // max(every, 1)
            if place in self.cut
            else num_bytes(leaf) * others
            for place, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
        )


def read_arguments(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    names: Sequence[str],
    whole: Collection[str],
    dim: int,
    replicas: int,
) -> Arguments:
    """Return the arguments of a call as they are cut; `names` are those of positional ones.

    ConfigError where tensors do not have the same rows along `dim`, or are hidden in an object.
    """
    pairs, spec = tree_flatten_with_path((args, dict(kwargs)))
    sizes: dict[int, tuple[str, int]] = {}
    problems: list[Problem] = []
    for place, (path, leaf) in enumerate(pairs):
        top, name = _name_of(path, names)
        if top in whole:
            continue
        if not isinstance(leaf, torch.Tensor):
            if _hides_tensors(leaf):
                message = f"{name} is a {type(leaf).__name__} with tensors, which is not cut"
                ways = ("its tensors, in a tuple or dict", f"whole = [{top!r}]")
                problems.append(THREADED_BATCH.problem(message, key=name, suggestions=ways))
        elif leaf.ndim > dim:
            sizes[place] = name, leaf.shape[dim]
        elif leaf.ndim:
            message = f"dim = {dim}, but {name} has {leaf.ndim} dims"
            problems.append(
                THREADED_BATCH.problem(message, key=name, suggestions=(f"whole = [{top!r}]",))
            )
    if len({size for _, size in sizes.values()}) > 1:
        message = f"along dim {dim} " + ", ".join(f"{n} has {size}" for n, size in sizes.values())
        ways = ("the same rows in each", "whole = [...], with the names of those of all rows")
        problems.append(THREADED_BATCH.problem(message, suggestions=ways))
    if problems:
        raise ConfigError(problems)
    rows = replica_rows(next(iter(sizes.values()))[1], replicas) if sizes else (0,)
    leaves = [leaf for _, leaf in pairs]
    return Arguments(leaves=leaves, spec=spec, cut=frozenset(sizes), rows=rows, dim=dim)


def _name_of(path: Sequence[Any], names: Sequence[str]) -> tuple[str, str]:
    """Return the name of the argument that a path leads to, and of what it leads to in there."""
    match path:
        case (SequenceKey(idx=0), SequenceKey(idx=place), *rest):
            top = names[place] if place < len(names) else f"args[{place}]"
        case (_, MappingKey(key=key), *rest):
            top = str(key)
        case _:
            raise AssertionError(path)
    return top, top + keystr(tuple(rest))


def _hides_tensors(value: object, depth: int = _DEPTH) -> bool:
    """Return whether an object that is walked no further has tensors in its fields or items."""
    if depth == 0 or isinstance(value, (*PLAIN, type)):
        return False
    held: list[object] = []
    if isinstance(value, Mapping):
        held += value.values()
    elif isinstance(value, (set, frozenset)):
        held += value
    held += getattr(value, "__dict__", {}).values()
    held += (
        getattr(value, slot, None)
        for kind in type(value).__mro__
        for slot in _slots(kind)
        if slot != "__dict__"
    )
    leaves = [leaf for one in held for leaf in tree_leaves(one)]
    return any(isinstance(one, torch.Tensor) for one in leaves) or any(
        _hides_tensors(one, depth - 1) for one in leaves
    )


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Hold the outputs of all replicas: the leaves of each, and what they have in common."""

    leaves: Sequence[Sequence[Any]]
    """Of each replica, in the same order."""
    spec: TreeSpec
    dim: int

    @property
    def tensors(self) -> list[int]:
        """Return the places of the leaves that are tensors."""
        return [n for n, leaf in enumerate(self.leaves[0]) if isinstance(leaf, torch.Tensor)]

    def parts(self, place: int) -> list[torch.Tensor]:
        """Return a tensor of each replica."""
        return [each[place] for each in self.leaves]

    def joined(self, place: int, device: torch.device) -> torch.Tensor:
        """Return a tensor of all replicas on `device`; [replicas] where they have numbers."""
        here = [part.to(device) for part in self.parts(place)]
        return torch.cat(here, self.dim) if here[0].ndim else torch.stack(here)

    def cut(self, place: int, joined: torch.Tensor) -> list[torch.Tensor]:
        """Return each replica's part of what has the shape of `joined(place)`."""
        parts = self.parts(place)
        if not parts[0].ndim:
            return list(joined.unbind())
        return list(joined.split([part.shape[self.dim] for part in parts], self.dim))

    def of_all(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output of a pass, with `tensors` in the places of those of replicas."""
        leaves = list(self.leaves[0])
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.spec)


def read_outputs(outputs: Sequence[Any], dim: int) -> Outputs:
    """Return the outputs of all replicas; ConfigError where they cannot be joined along `dim`."""
    flat = [tree_flatten(one) for one in outputs]
    spec = flat[0][1]
    for index, (_, other) in enumerate(flat):
        if other != spec:
            message = f"replica {index} returns {other}, and replica 0 {spec}"
            raise ConfigError([THREADED_OUTPUT.problem(message)])
    found = Outputs(leaves=[leaves for leaves, _ in flat], spec=spec, dim=dim)
    paths = [f"output{keystr(path)}" for path, _ in tree_flatten_with_path(outputs[0])[0]]
    problems = [
        THREADED_OUTPUT.problem(message, suggestions=ways)
        for place, path in enumerate(paths)
        for message, ways in _unlike(path, [each[place] for each in found.leaves], dim)
    ]
    if problems:
        raise ConfigError(problems)
    return found


def _unlike(path: str, values: Sequence[Any], dim: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield why what replicas give for one leaf cannot be one value."""
    if all(isinstance(one, torch.Tensor) for one in values):
        shapes = [tuple(one.shape) for one in values]
        others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
        if any(shapes) and (min(map(len, shapes)) <= dim or len(others) > 1):
            told = ", ".join(map(str, shapes))
            yield f"{path} has the shapes {told}, which do not join along dim {dim}", ()
    elif len({type(one) for one in values}) > 1:
        told = ", ".join(type(one).__name__ for one in values)
        yield f"{path} is {told} on the replicas", ()
    elif isinstance(values[0], PLAIN):
        if any(one != values[0] for one in values):
            told = ", ".join(map(repr, values))
            yield f"{path} is {told} on the replicas", ("return it as a tensor",)
    elif any(one is not values[0] for one in values):
        kind = type(values[0]).__name__
        yield f"{path} is a {kind} on each replica, which is not joined", ("tensors of it", "None")
