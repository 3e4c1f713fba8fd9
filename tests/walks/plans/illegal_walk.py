"""Random plans that break one rule: a proof refuses each, or its small plan breaks the rule, too.

A rule that were missing would let such a plan through to `echelon prove`, which must not make it
legal on its way. ``python -m tests.walks.plans.illegal_walk 500`` prints the rules of plans that
would be mended, with the change that broke each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.proof.changes import require_nothing_mended
from echelon.proof.shrink import shrink
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
    main(int(sys.argv[1]))
