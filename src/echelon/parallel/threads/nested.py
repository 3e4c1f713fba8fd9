# SPDX-License-Identifier: Apache-2.0
"""Arguments that are cut for replicas, and outputs that are joined: tensors in tuples and dicts.

Tensors are cut along one dim into the rows of each replica, as `torch.chunk` cuts. What is walked
is what PyTorch's own trees know: tuples, lists, dicts, named tuples, and classes that were
registered there, as the outputs of `transformers` are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
from echelon.core.rulebook.module import THREADED_BATCH, THREADED_OUTPUT
from echelon.cost.bytes.threads import replica_rows
from echelon.parallel.threads.workers import num_bytes

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
