"""Random plans that break one rule: a proof refuses each, or its small plan breaks the rule, too.

A rule that were missing would let such a plan through to `echelon prove`, which must not make it
legal on its way. ``python -m tests.walks.plans.illegal_walk 500`` prints the rules of plans that
would be mended, with the change that broke each.

With ``--ranks 40`` so many of these plans run on ranks as if their rule were off, in float64 and in
their own sizes: an engine that takes such a plan ends with an error, or differs from one process.
Where it is equal, the rule refuses more than it must, and the walk says so.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Literal

import pytest

from echelon.core.errors import ConfigError, ProofFailed, first_line
from echelon.core.parameters import num_parameters
from echelon.core.plan import DType, Plan
from echelon.launch.local.supervisor import RankPool
from echelon.proof import run
from echelon.proof.changes import require_nothing_mended
from echelon.proof.shrink import shrink
from tests.walks.matrix.cases import MAX_WORLD
from tests.walks.plans.derived_plans import broken_rules
from tests.walks.plans.test_random_families import NAMES, legal_plans

NUMBERS = (1, 2, 3, 5, 6, 7, 9, 10, 12, 15, 20)
"""Values of a number that is changed."""
OF_MODEL = ("heads", "kv_heads", "head_dim", "ffn", "hidden", "layers")
OF_EXPERTS = ("num_experts", "top_k", "ffn", "groups", "top_groups", "first_dense_layers")
OF_MESH = ("tp", "pp", "cp", "dp_shard", "dp_replicate", "ep")
OF_BATCH = ("global_sequences", "sequence_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Hold a plan that breaks one rule, and the change that broke it."""

    plan: Plan
    rule: str
    change: str


def changed(plan: Plan, random: Random) -> tuple[Plan, str]:
    """Return a plan with one other number, and which."""
    mathematics, layout, experts = plan.mathematics, plan.layout, plan.model.experts
    tables = {"model": OF_MODEL, "mesh": OF_MESH, "batch": OF_BATCH}
    if experts is not None:
        tables["experts"] = OF_EXPERTS
    table = random.choice(list(tables))
    name, value = random.choice(tables[table]), random.choice(NUMBERS)
    number = {name: value}
    if table == "model":
        mathematics = replace(mathematics, model=replace(plan.model, **number))
    elif table == "experts" and experts is not None:
        model = replace(plan.model, experts=replace(experts, **number))
        mathematics = replace(mathematics, model=model)
    elif table == "mesh":
        layout = replace(layout, mesh=replace(plan.mesh, **number))
    else:
        mathematics = replace(mathematics, **number)
    return replace(plan, mathematics=mathematics, layout=layout), f"{table}.{name} = {value}"


def illegal_plans(family: str, count: int) -> Iterator[Broken]:
    """Yield plans of a family, each with one broken rule; of a plan of it at most one."""
    for number, plan in enumerate(legal_plans(family, count)):
        random = Random(f"illegal/{family}/{number}")
        for _ in range(20):
            other, change = changed(plan, random)
            try:
                rules = {problem.partition(":")[0] for problem in broken_rules(other)}
            except (ValueError, ArithmeticError, LookupError, AssertionError):
                continue
            if len(rules) == 1:
                yield Broken(plan=other, rule=rules.pop(), change=change)
                break


def is_mended(broken: Broken) -> bool:
    """True if a proof would run a legal plan in the place of a broken plan."""
    try:
        small = shrink(broken.plan)
        require_nothing_mended(broken.plan, small)
    except (ConfigError, ValueError, ArithmeticError, LookupError, AssertionError):
        return False
    return all(not problem.startswith(f"{broken.rule}:") for problem in broken_rules(small))


Outcome = Literal["ends with an error", "differs", "equal"]

MOST_PARAMETERS = 2 * 10**7
"""Parameters of a plan that runs in its own sizes."""
MOST_OF_A_RULE = 4
"""Plans of a rule that run on ranks."""
STILL_S = 10.0
"""Seconds after which ranks that all wait are ended."""


def in_own_sizes(plan: Plan, *, precision: DType | None = None, names_apart: bool = False) -> Plan:
    """Return the plan of a proof with sizes, blocks and batches as they were given."""
    small, given = shrink(plan, precision=precision, names_apart=names_apart), plan.mathematics
    blocks = given.precision.fp8_block, given.precision.int8_block
    mathematics = replace(
        small.mathematics,
        model=given.model,
        sequence_length=given.sequence_length,
        global_sequences=given.global_sequences,
        balance=given.balance,
        precision=replace(small.mathematics.precision, fp8_block=blocks[0], int8_block=blocks[1]),
    )
    layout = replace(plan.layout, tp_overlap=small.layout.tp_overlap, kernels=small.layout.kernels)
    return replace(small, mathematics=mathematics, layout=layout)


def outcome_on_ranks(broken: Broken, pool: RankPool) -> tuple[Outcome, str]:
    """Run a broken plan on ranks with nothing mended; return what came of it, and its problem."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "require_nothing_mended", lambda *_: None)
        patch.setattr(run, "shrink", in_own_sizes)
        try:
            quick = not broken.plan.mathematics.updates.is_asynchronous
            run.prove(broken.plan, run_ranks=pool.run, own_precision=False, quick=quick).require()
        except ProofFailed as error:
            return "differs", error.problems[0].message
        except Exception as error:
            # Whatever it is, the plan is not taken.
            return "ends with an error", f"{type(error).__name__}: {first_line(error)}"
    return "equal", ""


def small_enough(plan: Plan) -> bool:
    """Return whether ranks of one machine can run a plan in its own sizes."""
    return plan.mesh.world_size <= MAX_WORLD and num_parameters(plan.model) <= MOST_PARAMETERS


def plans_of_ranks(count: int) -> Iterator[Broken]:
    """Yield broken plans of all families in turn, of each rule a few."""
    met = Counter[str]()
    families = zip(*(illegal_plans(family, 4 + count // 4) for family in NAMES), strict=False)
    for broken in (one for plans in families for one in plans if small_enough(one.plan)):
        met[broken.rule] += 1
        if met[broken.rule] <= MOST_OF_A_RULE:
            yield broken


def walk_on_ranks(count: int) -> None:
    """Run `count` broken plans on ranks, and print what came of each, and of each rule."""
    outcomes = Counter[tuple[str, Outcome]]()
    with RankPool(MAX_WORLD, still_s=STILL_S) as pool:
        for broken in islice(plans_of_ranks(count), count):
            outcome, problem = outcome_on_ranks(broken, pool)
            outcomes[broken.rule, outcome] += 1
            text = f"{broken.rule}, {broken.change}: {outcome}: {problem}"
            if outcome == "equal":
                text = f"rule {broken.rule} is too strict for: {broken.change}"
            print(f"{text} ({run.mesh_text(broken.plan)})", flush=True)
    for (rule, outcome), number in sorted(outcomes.items()):
        print(f"{number:6} {rule}: {outcome}")


def main(count: int) -> None:
    """Walk over `count` plans of each family, and print what would be mended."""
    met, mended = Counter[str](), Counter[str]()
    for family in NAMES:
        for broken in illegal_plans(family, count):
            met[broken.rule] += 1
            if is_mended(broken):
                mended[broken.rule] += 1
                print(f"{family}: {broken.rule} is mended: {broken.change}")
    print(f"{met.total()} plans with one broken rule, {mended.total()} mended")
    for rule, number in met.most_common():
        print(f"{number:6} {rule}" + f", {mended[rule]} mended" * bool(mended[rule]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.walks.plans.illegal_walk")
    parser.add_argument("count", type=int, nargs="?", default=20, help="plans of each family (20)")
    parser.add_argument("--ranks", type=int, default=0, help="plans that run on ranks as well (0)")
    options = parser.parse_args()
    main(options.count)
    if options.ranks:
        walk_on_ranks(options.ranks)
