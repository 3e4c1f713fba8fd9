# SPDX-License-Identifier: Apache-2.0
"""What each rank does in a proof: build the subject, step it, write down everything it says.

Results travel as files in a directory that the parent owns: tensors as safetensors, the rest as
JSON, one pair per rank and precision.

Shape suffixes: n tokens that passed on a rank, W numbers of each.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.prove import PROVE_SUBJECT
from echelon.launch.context import RankContext
from echelon.parallel.completion.completion import Completion
from echelon.parallel.completion.late import LateCompletion
from echelon.parallel.storage.weights import Shard
from echelon.proof.evidence.run import GRADIENTS, INITIAL, PARAMETERS, HeldPart
from echelon.proof.oracle.batches import global_batch
from echelon.proof.subject import (
    Factory,
    LateFactory,
    ReportedActivation,
    ReportedRouting,
    StepRecord,
    Subject,
)
from echelon.proof.sum_bounds import SumNote, SumNotes, notes_as_json, notes_from_json

_OPTIONAL = ("bytes_sent", "bytes_far", "actions", "skipped", "loss_scale", "bytes_held")
"""What a report may leave out, beside its routing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedShard(HeldPart):
    """Hold one rectangle that one rank said it holds.

    `kind` is "gradients", "parameters" or "masters" (the values that the optimizer keeps).
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    primary: bool

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.region]

    def put_into(self, whole: torch.Tensor) -> None:
        whole[self.region] = self.tensor.to(whole.dtype)

    @property
    def region(self) -> tuple[slice, ...]:
        """Return where the piece lies in the whole tensor."""
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.offset, self.tensor.shape, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Hold all that one rank said in one precision; and how many operations were watched."""

    rank: int
    reports: tuple[StepRecord, ...]
    shards: tuple[ObservedShard, ...]
    activations: tuple[ObservedActivation, ...] = ()
    num_operations: int = 0
    sums: tuple[SumNote, ...] = ()


def run_subject(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Put one rank of a subject through a proof: the target that the ranks run.

    `argument` holds `plans` (as JSON, one per precision), `num_steps` (one for each of them),
    `subject` ("module:function"), `directory`, and `late`: whether operations complete as late as
    they may.
    """
    factory, directory = find_factory(argument["subject"]), Path(argument["directory"])
    runs = zip(argument["plans"], argument["num_steps"], strict=True)
    for number, (text, num_steps) in enumerate(runs):
        plan = Plan.from_json(text)
        completion: Completion = Completion()
        if argument["late"]:
            races = race_file(directory, number, context.rank)
            completion = LateCompletion(context.rank, plan.mathematics.seed, races)
            subject = cast(LateFactory, factory)(context, plan, completion)
        else:
            subject = factory(context, plan)
        try:
            result = _observe(context.rank, subject, plan, num_steps, completion)
        finally:
            close = getattr(subject, "close", None)
            if close is not None:
                close()
        completion.close()
        _write(result, directory, number)


def find_factory(subject: str) -> Factory:
    """Return the factory that "module:function" names; a ConfigError says why it cannot be had."""
    module_name, _, name = subject.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            PROVE_SUBJECT.problem(f"subject {subject!r} cannot be imported: {error}")
        ) from error
    if not callable(factory):
        raise ConfigError(PROVE_SUBJECT.problem(f"subject {subject!r} is not a function"))
    return cast(Factory, factory)


def read_results(directory: Path, number: int, world_size: int) -> tuple[RankResult, ...]:
    """Return what every rank wrote for plan `number`."""
    return tuple(_read(directory, number, rank) for rank in range(world_size))


def _observe(
    rank: int, subject: Subject, plan: Plan, num_steps: int, completion: Completion
) -> RankResult:
    pieces = _values(rank, INITIAL, subject, plan)
    reports: list[StepRecord] = []
    passed: list[ObservedActivation] = []
    activations: Any = getattr(subject, "activations", None)
    sums, watch_sums = SumNotes(plan), getattr(subject, "watch_sums", None)
    if watch_sums is not None and plan.mathematics.precision.gradients == "fp64":
        watch_sums(sums.see)
    for step in range(num_steps):
        sums.step = step
        with completion.watching():
            reports.append(_record(subject.step(global_batch(plan, step), step)))
        with completion.observing():
            pieces += _observed_shards(rank, GRADIENTS, step, subject.gradients())
            pieces += _values(rank, step, subject, plan)
            if activations is not None:
                passed += observe_activations(rank, step, activations())
    return RankResult(
        rank=rank,
        reports=tuple(reports),
        shards=tuple(pieces),
        activations=tuple(passed),
        num_operations=completion.num_operations,
        sums=tuple(sums.found),
    )


def _values(rank: int, step: int, subject: Subject, plan: Plan) -> list[ObservedShard]:
    pieces = _observed_shards(rank, PARAMETERS, step, subject.parameters())
    masters: Any = getattr(subject, "masters", None)
    if masters is not None and plan.mathematics.precision.has_master:
        pieces += _observed_shards(rank, "masters", step, masters())
    # An engine from elsewhere may have islands and no step parts.
    parts: Any = getattr(subject, "step_parts", None) or getattr(subject, "outer", None)
    for kind, shards in () if parts is None else parts().items():
        pieces += _observed_shards(rank, kind, step, shards)
    return pieces


def _observed_shards(
    rank: int, kind: str, step: int, shards: Mapping[str, Sequence[Shard]]
) -> list[ObservedShard]:
    return [
        ObservedShard(
            rank=rank,
            kind=kind,
            step=step,
            name=name,
            global_shape=tuple(shard.global_shape),
            offset=tuple(shard.offset),
            primary=shard.primary,
            # A copy: the engine goes on to write into the memory behind the view.
            tensor=shard.tensor.detach().cpu().clone(memory_format=torch.contiguous_format),
        )
        for name, held in shards.items()
        for shard in held
    ]


def _record(report: Any) -> StepRecord:
    return StepRecord(
        loss=float(report.loss),
        tokens=int(report.tokens),
        grad_norm=float(report.grad_norm),
        microbatch_losses={
            (int(dp_rank), int(microbatch)): (float(total), int(count))
            for (dp_rank, microbatch), (total, count) in report.microbatch_losses.items()
        },
        samples=tuple(int(i) for i in report.samples),
        layers=tuple(int(i) for i in report.layers),
        routing=ReportedRouting.from_report(getattr(report, "routing", None)),
        **{key: getattr(report, key, None) for key in _OPTIONAL},
    )


def race_file(directory: Path, number: int, rank: int) -> Path:
    """Return where a rank writes down the races that it finds in plan `number`."""
    return directory / f"races-{number}-rank-{rank:04d}.jsonl"


def _stem(directory: Path, number: int, rank: int) -> Path:
    return directory / f"plan-{number}-rank-{rank:04d}"


def _write(result: RankResult, directory: Path, number: int) -> None:
    stem = _stem(directory, number, result.rank)
    keys = ("kind", "step", "name", "global_shape", "offset", "primary")
    tables = [{key: getattr(piece, key) for key in keys} for piece in result.shards]
    tensors = {str(index): piece.tensor for index, piece in enumerate(result.shards)}
    tensors |= activation_tensors(result.activations)
    save_file(tensors, stem.with_suffix(".safetensors"))
    reports = []
    for report in result.reports:
        losses = [[*slot, *value] for slot, value in report.microbatch_losses.items()]
        reports.append({**asdict(report), "microbatch_losses": losses})
    passed = activation_tables(result.activations)
    text = json.dumps(
        {
            "reports": reports,
            "pieces": tables,
            "activations": passed,
            "num_operations": result.num_operations,
            "sums": notes_as_json(result.sums),
        }
    )
    stem.with_suffix(".json").write_text(text, encoding="utf-8")


def _read(directory: Path, number: int, rank: int) -> RankResult:
    stem = _stem(directory, number, rank)
    data = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    tensors = load_file(stem.with_suffix(".safetensors"))
    pieces = tuple(
        ObservedShard(
            **table
            | {key: tuple(table[key]) for key in ("global_shape", "offset")}
            | {"rank": rank, "tensor": tensors[str(index)]}
        )
        for index, table in enumerate(data["pieces"])
    )
    reports = tuple(
        StepRecord(
            **{
                **report,
                "microbatch_losses": {(r, m): (total, n) for r, m, total, n in losses},
                "routing": ReportedRouting.from_json(report["routing"]),
            }
        )
        for report in data["reports"]
        for losses in [report["microbatch_losses"]]
    )
    return RankResult(
        rank=rank,
        reports=reports,
        shards=pieces,
        activations=read_activations(rank, data["activations"], tensors),
        num_operations=data["num_operations"],
        sums=notes_from_json(data["sums"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedActivation:
    """Hold what passed one boundary on one rank in a step: see `subject.ReportedActivation`."""

    rank: int
    step: int
    name: str
    gradient: bool
    recomputed: bool
    tokens_n: torch.Tensor
    values_nW: torch.Tensor


_TOLD = ("step", "name", "gradient", "recomputed")


def observe_activations(
    rank: int, step: int, reported: Iterable[ReportedActivation]
) -> list[ObservedActivation]:
    """Return copies of what a subject says of its last step."""
    return [
        ObservedActivation(
            rank=rank,
            step=step,
            name=str(one.name),
            gradient=bool(one.gradient),
            recomputed=bool(one.recomputed),
            tokens_n=one.tokens_n.detach().cpu().clone(),
            values_nW=one.values_nW.detach().cpu().contiguous().clone(),
        )
        for one in reported
    ]


def activation_tables(activations: Sequence[ObservedActivation]) -> list[dict[str, Any]]:
    """Return what is written beside the tensors."""
    return [{key: getattr(one, key) for key in _TOLD} for one in activations]


def activation_tensors(activations: Sequence[ObservedActivation]) -> dict[str, torch.Tensor]:
    """Return the tensors to write, by a name for each."""
    tokens = {f"activation {i} tokens": one.tokens_n for i, one in enumerate(activations)}
    return tokens | {f"activation {i}": one.values_nW for i, one in enumerate(activations)}


def read_activations(
    rank: int, tables: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]
) -> tuple[ObservedActivation, ...]:
    """Return what was written of a rank."""
    return tuple(
        ObservedActivation(
            rank=rank,
            tokens_n=tensors[f"activation {index} tokens"],
            values_nW=tensors[f"activation {index}"],
            **table,
        )
        for index, table in enumerate(tables)
    )
