"""Exports and imports of our trainer with a bug: what a rank calls in place of the right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.interop.hugging_face.folder import FolderTensor
from echelon.interop.weight_names.names import WeightNaming, find_naming
from echelon.interop.weight_names.source import ParameterSource, RotaryPairs
from echelon.training import whole_run
from echelon.training.checkpoint.shard_file import tensor_bytes
from echelon.training.weights import export, load
from echelon.training.weights.writers import formats, megatron, task
from echelon.training.weights.writers.archive import OpenArchive
from tests.proof.whole_run.wrong_trainers import planted

QUERY = "layers.1.attention.q.weight"


def with_source(
    tensors: tuple[FolderTensor, ...], name: str, **changes: Any
) -> tuple[FolderTensor, ...]:
    """Return the tensors of a folder with a parameter that lies otherwise in its own."""
    return tuple(
        replace(
            tensor,
            parts=tuple(
                (part, replace(source, **changes) if part == name else source)
                for part, source in tensor.parts
            ),
        )
        for tensor in tensors
    )


def lies_otherwise(patch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    """Write a parameter otherwise into folders with names of transformers."""
    right = task.folder_tensors
    patch.setattr(task, "folder_tensors", lambda *args: with_source(right(*args), name, **changes))


@planted(whole_run.export)
def rotary_pairs_side_by_side(patch: pytest.MonkeyPatch) -> None:
    """Write queries of a block with the two dims of each pair side by side, as Meta has them."""
    lies_otherwise(patch, QUERY, order=RotaryPairs(period=6, start=0))


@planted(whole_run.export)
def square_matrix_not_transposed(patch: pytest.MonkeyPatch) -> None:
    """Write a matrix of GPT-2 as it is here, [out, in]."""
    lies_otherwise(patch, "layers.0.attention.o.weight", transposed=False)


@planted(whole_run.export)
def gate_and_what_it_gates_change_places(patch: pytest.MonkeyPatch) -> None:
    """Write the gate where its product has its other factor in torchtitan, and the other way."""

    def swapped(*args: Any) -> WeightNaming | None:
        naming = find_naming(*args)
        assert naming is not None
        sources = dict(naming.sources)
        gate, up = (f"layers.0.mlp.{name}.weight" for name in ("gate", "up"))
        sources[gate], sources[up] = sources[up], sources[gate]
        return replace(naming, sources=sources)

    patch.setattr("echelon.training.weights.writers.formats.find_naming", swapped)


@planted(whole_run.export)
def adapters_merged_without_their_scale(patch: pytest.MonkeyPatch) -> None:
    """Merge adapters by alpha, and not by alpha / rank."""
    right = task.ExportTask.scale.fget
    assert right is not None
    get: Callable[[task.ExportTask], float] = right
    patch.setattr(task.ExportTask, "scale", property(lambda self: get(self) * self.shape.lora.rank))


@planted(whole_run.export)
def rows_behind_a_block_come_from_before_it(patch: pytest.MonkeyPatch) -> None:
    """Merge adapters into rows of which each block but the first begins one too early."""
    window = export._window

    def early(first: int, *args: Any) -> Any:
        return window(max(first - 1, 0), *args)

    patch.setattr(export, "_window", early)


@planted(whole_run.export)
def digits_are_cut_off(patch: pytest.MonkeyPatch) -> None:
    """Cut off the digits that bfloat16 has not, in place of rounding to the nearest number."""
    right = task.filled

    def cut(model: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        if dtype is not torch.bfloat16:
            return right(model, tensor, dtype)
        bits = right(model, tensor, torch.float32).view(torch.int32) & -(2**16)
        return bits.view(torch.float32).to(torch.bfloat16)

    patch.setattr(task, "filled", cut)


@planted(whole_run.export)
def imported_rows_have_another_order(patch: pytest.MonkeyPatch) -> None:
    """Read keys of a block as if a folder had pairs side by side."""
    right = whole_run.find_weights

    def turned(*args: Any) -> Any:
        weights = right(*args)
        name = "layers.0.attention.k.weight"
        stored, source = weights.sources[name]
        source = replace(source, order=RotaryPairs(period=6, start=0))
        return replace(weights, sources={**weights.sources, name: (stored, source)})

    patch.setattr(whole_run, "find_weights", turned)


def names_with_pairs(*args: Any) -> WeightNaming | None:
    """Return a table of names that has pairs of queries of a block side by side."""
    naming = find_naming(*args)
    assert naming is not None
    source: ParameterSource = naming.sources[QUERY]
    if not source.key.startswith("model."):
        return naming
    source = replace(source, order=RotaryPairs(period=6, start=0))
    return replace(naming, sources={**naming.sources, QUERY: source})


@planted(whole_run.export)
def table_of_names_has_pairs(patch: pytest.MonkeyPatch) -> None:
    """Write by a wrong table of names; the prover may have the same one."""
    patch.setattr("echelon.interop.hugging_face.folder.find_naming", names_with_pairs)


@planted(whole_run.export)
def columns_of_a_rank_are_the_first(patch: pytest.MonkeyPatch) -> None:
    """Read the first columns of a file into each piece of a matrix."""
    meet = load._meet

    def first(name: str, weights: Any, run: Any, target: torch.Tensor, column: int) -> Any:
        return meet(name, weights, run, target, 0)

    patch.setattr(load, "_meet", first)


@planted(whole_run.export)
def moments_change_places(patch: pytest.MonkeyPatch) -> None:
    """Write what Adam keeps of squares where its mean of gradients belongs, and the other way."""

    def swapped(**fields: Any) -> formats.UniversalFolder:
        models = dict(fields["models"])
        models["exp_avg"], models["exp_avg_sq"] = models["exp_avg_sq"], models["exp_avg"]
        return right(**{**fields, "models": models})

    right = formats.UniversalFolder
    patch.setattr(formats, "UniversalFolder", swapped)


@planted(whole_run.export)
def halves_of_a_gate_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    """Cut the gate and what it gates as one matrix, for the tensor ranks of Megatron-LM."""
    cutter = megatron._cutter
    patch.setattr(megatron, "_cutter", lambda key, gated, tp: cutter(key, False, tp))


@planted(whole_run.export)
def last_rows_of_a_part_come_too_early(patch: pytest.MonkeyPatch) -> None:
    """Write the last rows of what lies in pieces over those before them, if they are fewer."""

    def write(self: OpenArchive, key: str, *values: torch.Tensor) -> None:
        with self._file.open("r+b") as stream:
            stream.seek(self._places[key].start)
            for value in values:
                at_once = self._rows_at_once(value)
                rows = len(value) if value.is_contiguous() else max(1, at_once)
                for part in value.split(rows):
                    if len(part) < rows:
                        stream.seek(-part[0].numel() * part.element_size(), 1)
                    stream.write(tensor_bytes(part))

    patch.setattr(OpenArchive, "write", write)


@planted(whole_run.export)
def adapters_in_the_order_of_pairs(patch: pytest.MonkeyPatch) -> None:
    """Write rows of adapters of queries with the two dims of each pair side by side."""
    right = task.adapter_tensors

    def turned(*args: Any) -> tuple[FolderTensor, ...]:
        name = QUERY.replace(".weight", ".lora_b.weight")
        return with_source(right(*args), name, order=RotaryPairs(period=6, start=0))

    patch.setattr(task, "adapter_tensors", turned)
