# SPDX-License-Identifier: Apache-2.0
"""The proof of a user's file: one device, then the ranks in each precision, then the verdict.

Frameworks keep state in their modules, so one device and the ranks of each precision run in
processes of their own. Under torchrun the processes are there already: all of it runs in them, and
rank 0 judges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from echelon.launch.context import RankContext
from echelon.proof.causes.diagnose import diagnose, diagnose_races
from echelon.proof.claims.captured_checks import subject_tolerance
from echelon.proof.claims.claims import judge
from echelon.proof.evidence.captured import CapturedRun, RankCapture, ReferencePass
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verdict import ProofPass, SubjectProof, running_versions
from echelon.proof.verify.capture import capture_rank
from echelon.proof.verify.reference import OneDeviceAnswer, run_one_device

_ONE_DEVICE = "echelon.proof.verify.reference:run_one_device"
_ON_RANK = "echelon.proof.verify.capture:capture_rank"


class SubjectRunner(Protocol):
    """Start ranks that call ``target(context, argument)`` and return what each returned."""

    def __call__(
        self, target: str, argument: object, world_size: int, /, *, labels: Sequence[str]
    ) -> list[Any]:
        """Return when all ranks have; raise what the first failing rank raised."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRanks:
    """Say how ranks are started: `fresh` has the next ones run in new processes."""

    run: SubjectRunner
    fresh: Callable[[], None]


def verify_subject(
    file: Path,
    ranks: SubjectRanks,
    *,
    num_ranks: int | None = None,
    before_ranks: Callable[[NamedMesh], None] | None = None,
    given: Mapping[str, object] = MappingProxyType({}),
) -> SubjectProof:
    """Return the proof of a user's file on ranks that are started here.

    `given` is for a subject that is more than its file: an `opener`, and what that takes. With its
    `late` asynchronous calls of the program complete when they are awaited, and not before.
    `num_ranks` is what the user says the mesh has; `before_ranks` may refuse it. ConfigError for
    what is wrong with the file; RankFailure where a rank fails otherwise.
    """
    argument = {**given, "file": str(file.resolve()), "ranks": num_ranks}
    ranks.fresh()
    answer: OneDeviceAnswer = ranks.run(_ONE_DEVICE, argument, 1, labels=("one device",))[0]
    mesh = answer.settings.mesh
    if before_ranks is not None:
        before_ranks(mesh)
    labels = [mesh.label(rank) for rank in range(mesh.world_size)]
    captures: list[Sequence[RankCapture]] = []
    for one in answer.passes:
        ranks.fresh()
        wanted = _rank_argument(argument, answer, one)
        captures.append(ranks.run(_ON_RANK, wanted, mesh.world_size, labels=labels))
    return judge_captures(str(file), answer, captures)


def verify_on_this_rank(context: RankContext, argument: Mapping[str, Any]) -> SubjectProof:
    """Return the proof of a user's file, run by ranks that a launcher started: a target of each.

    `argument` is that of `run_one_device`. All ranks return the proof that rank 0 made.
    """
    # Tensors of other devices than the CPU are not sent: captures are copies on the CPU.
    group: Any = dist.new_group(backend="gloo")
    answers: list[Any] = [run_one_device(context, argument) if context.rank == 0 else None]
    dist.broadcast_object_list(answers, src=0, group=group)
    answer: OneDeviceAnswer = answers[0]
    captures: list[Sequence[RankCapture]] = []
    for one in answer.passes:
        mine = capture_rank(context, _rank_argument(argument, answer, one))
        every: list[Any] = [None] * context.world_size
        dist.all_gather_object(every, mine, group=group)
        captures.append(every)
    proofs: list[Any] = [None]
    if context.rank == 0:
        proofs = [judge_captures(argument["file"], answer, captures)]
    dist.broadcast_object_list(proofs, src=0, group=group)
    return proofs[0]


def _rank_argument(
    argument: Mapping[str, object], answer: OneDeviceAnswer, one: ReferencePass
) -> Mapping[str, object]:
    return {
        **argument,
        "settings": answer.settings,
        "dtype": one.dtype,
        "logical": one.exact.logical,
        "initial": one.exact.initial,
        "modules": frozenset(passed.name for passed in one.exact.passed.tensors),
    }


def judge_captures(
    file: str, answer: OneDeviceAnswer, captures: Sequence[Sequence[RankCapture]]
) -> SubjectProof:
    """Return the verdict on what the ranks captured in each pass."""
    settings, passes = answer.settings, list[ProofPass]()
    framework = ""
    for one, captured in zip(answer.passes, captures, strict=True):
        run = CapturedRun(settings.mesh, one.exact.logical, captured)
        framework = run.framework
        calls = max(run.num_calls(step) for step in range(settings.num_steps))
        evidence = CapturedEvidence(
            mesh=settings.mesh,
            steps=one.exact.steps,
            initial=one.exact.initial,
            passed=one.exact.passed,
            run=run,
            tolerance=subject_tolerance(one, settings.mesh.world_size + calls),
            dtype=getattr(torch, one.dtype),
        )
        results = judge(evidence)
        broken = any(not earlier.holds for earlier in passes)
        passes.append(
            ProofPass(
                precision=_SHORT.get(one.dtype, one.dtype),
                claims=results,
                diagnosis=None
                if broken
                else diagnose_races(evidence.late, results) or diagnose(evidence, results),
            )
        )
    shapes = answer.passes[0].exact.logical.shapes
    return SubjectProof(
        file=file,
        mesh=str(settings.mesh),
        framework=framework,
        seed=settings.seed,
        num_steps=settings.num_steps,
        num_parameters=len(shapes),
        num_elements=sum(torch.Size(shape).numel() for shape in shapes.values()),
        versions=running_versions(),
        passes=tuple(passes),
    )


_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Precisions as users read them."""
