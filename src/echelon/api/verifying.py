# SPDX-License-Identifier: Apache-2.0
"""`ec.verify`, `ec.prove_module`: a program of any framework, or an own module, and one device.

`ec.rehearse`: what the ranks of a plan would do on GPUs, found out without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from echelon.api.given_plan import GivenPlan, plan_from_given
from echelon.config.reading import (
    DEVICE_FUNCTION,
    RANK_FUNCTION,
    require_module,
    require_program,
    split_program,
)
from echelon.core.optional import optional_package
from echelon.layout.islands import without_losses

if TYPE_CHECKING:
    from echelon.proof.bisect.verdict import Bisection
    from echelon.proof.verdict import SubjectProof
    from echelon.rehearsal.run import Rehearsal

RANK_LIMIT_S = 300.0
"""How long the ranks of one precision may take: frameworks are imported in this time too."""

NUM_STEPS = 3
"""Optimizer steps of an own module where nobody says how many."""

STILL_S = 15.0
"""How long all ranks may wait for one another while none of them computes."""


def verify(subject: str | Path, *, ranks: int | None = None, late: bool = False) -> SubjectProof:
    """Return the proof of a Python file with `one_device` and `on_rank`, by ranks started here.

    The file's MESH says how many ranks there are; `ranks` may state it, or give a file without a
    mesh data-parallel ones; `FILE:function` takes another function for the program of a rank
    than `on_rank`. With `late` the program's asynchronous calls of `torch.distributed` complete
    when they are awaited, and not before. Under torchrun the ranks that it started are joined,
    and `late` is refused. `proof.proven` is
    the answer; `proof.require()` raises ProofFailed, and so does this where ranks wait for one
    another and none will come. ConfigError for a mistake in the file, with the line of it;
    RankFailure for a rank that is killed or stuck.
    """
    file, function = split_program(subject, RANK_FUNCTION)
    require_program(file, (DEVICE_FUNCTION, function))
    optional_package("torch", extra="train", purpose="proving a program")
    from echelon.launch.environment import is_launched

    if is_launched():
        if late:
            from echelon.core.errors import ConfigError
            from echelon.core.rulebook.verify import VERIFY_MESH

            problem = "late completion is watched on ranks that are started here, not by torchrun"
            raise ConfigError(VERIFY_MESH.problem(problem, suggestions=("without torchrun",)))
        return _join(Path(subject), ranks)
    return verify_here(Path(subject), num_ranks=ranks, given={"late": late})


def verify_here(
    file: Path, *, num_ranks: int | None = None, given: Mapping[str, object] = MappingProxyType({})
) -> SubjectProof:
    """Return the proof of a file on ranks that are started here; see `verify_subject`."""
    from functools import partial

    from echelon.core.errors import ProofFailed
    from echelon.launch.host import require_memory_for_ranks
    from echelon.launch.local.supervisor import RankPool
    from echelon.launch.root_cause import FaultKind, RankFailure
    from echelon.proof.verify.subject_file import MAX_RANKS
    from echelon.proof.verify.verify import SubjectRanks, verify_subject

    try:
        with RankPool(MAX_RANKS, still_s=STILL_S) as pool:
            started = SubjectRanks(run=partial(pool.run, timeout_s=RANK_LIMIT_S), fresh=pool.renew)
            return verify_subject(
                file,
                started,
                num_ranks=num_ranks,
                before_ranks=lambda mesh: require_memory_for_ranks(mesh.world_size),
                given=given,
            )
    except RankFailure as failure:
        # What is the user's to mend is said as it is, not as the failure of some rank.
        if failure.error is not None:
            raise failure.error from None
        if failure.fault.kind is FaultKind.NEVER_MET:
            # The program ran, and the answer is no.
            raise ProofFailed(failure.problems) from None
        raise


def bisect_program(
    subject: str | Path, *, ranks: int | None = None, late: bool = False
) -> Bisection | None:
    """Return the smallest program that fails as a Python file does; None where it is proven.

    Degrees of its MESH and other numbers in capitals at its top are halved as long as the same rule
    is broken. ConfigError under torchrun: the ranks of smaller programs are started here.
    """
    optional_package("torch", extra="train", purpose="proving a program")
    from echelon.core.errors import ConfigError
    from echelon.core.rulebook.verify import VERIFY_MESH
    from echelon.launch.environment import is_launched
    from echelon.proof.bisect.program import bisect_program as bisect_with

    if is_launched():
        problem = "a program is bisected on ranks that are started here, not by torchrun"
        raise ConfigError(VERIFY_MESH.problem(problem, suggestions=("without torchrun",)))
    return bisect_with(str(subject), lambda file: verify(file, ranks=ranks, late=late))


def _join(subject: Path, ranks: int | None) -> SubjectProof:
    """Run this process's rank of a proof that a launcher started."""
    import torch

    from echelon.launch.environment import read_launched_rank
    from echelon.launch.launched.rank import run_launched_rank
    from echelon.launch.local.supervisor import LaunchOptions

    place = read_launched_rank()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    outcome = run_launched_rank(
        "echelon.proof.verify.verify:verify_on_this_rank",
        {"file": str(subject.resolve()), "ranks": ranks or place.world_size},
        labels=[""] * place.world_size,
        options=LaunchOptions(backend=backend),
    )
    if outcome.failure is not None:
        raise outcome.failure.error or outcome.failure
    return outcome.results[0]


def prove_module(
    factory: str | Path, plan: GivenPlan, *, num_steps: int = NUM_STEPS
) -> SubjectProof:
    """Return the proof that `ec.parallelize` under `plan` computes what one process does.

    `factory` is FILE:FUNCTION; the function returns a module, `batch(step, data_rank)`,
    `loss(module, batch)` and, if wanted, a mapping of what `parallelize` takes by name. For a plan
    with stages or context ranks, the loss is one of `parallelize` ("causal"), and batches are named
    tensors. It runs in float64, then in the dtype of the plan's parameters; ranks are started here,
    over Gloo.
    Losses, every gradient, optimizer state, updates and all parameters after `num_steps` are
    compared. `proof.proven` is the answer; `proof.require()` raises ProofFailed. ConfigError for a
    mistake in the file or a module that cannot be split; RunFailed for what the ranks refuse in
    their first step.
    """
    require_module(factory)
    optional_package("torch", extra="train", purpose="proving a module")
    from echelon.api.module_subject import OPENER

    given = {"opener": OPENER, "plan": plan_from_given(plan).to_json(), "num_steps": num_steps}
    return verify_here(Path(factory), given=given)


def rehearse(
    plan: str | Path | GivenPlan,
    *,
    whole: bool = False,
    workers: int | None = None,
    traces: str | Path | None = None,
) -> Rehearsal:
    """Return the actions of every distinct rank of `plan` in a step on GPUs under NCCL.

        found = ec.rehearse(ec.plan("llama3-70b", "64xh100"))

    The engine that trains is built and stepped on tensors without elements, so no GPU and no
    weights are needed, whatever the size. `found.faults` are calls that would hang, mix up or race,
    and reads that hold the host; `found.ranks` have the memory, the kernels and the bytes of one
    rank of each class; `found.require()` raises ProofFailed where anything is wrong.

    `plan` may also be a run.toml or preset, a plan.json or the folder of a run. A step has two
    rounds of its pipeline, or with `whole` all of its microbatches. `workers` are the processes
    that are used, one for each core by default. `traces` is a folder that is made, and gets a trace
    of each distinct rank, for chrome://tracing and ui.perfetto.dev; or NAME.json.gz, for a file
    NAME-RANK.json.gz of each.
    """
    optional_package("torch", extra="train", purpose="rehearsing a plan")
    from echelon.api.converting import read_plan
    from echelon.rehearsal.run import rehearse as rehearse_plan

    found = read_plan(plan)[0] if isinstance(plan, str | Path) else plan_from_given(plan)
    folder = None if traces is None else Path(traces)
    if found.mathematics.local_sgd.is_elastic:
        # Losses are of a run; the calls of a step are those of islands that lose none.
        found = without_losses(found)
    return rehearse_plan(found, workers=workers, whole=whole, traces=folder)
