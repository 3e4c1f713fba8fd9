"""Two plans side by side: what differs, whether both compute the same, what ranks hold and send.

Bytes come from `cost/bytes_held.py` and `cost/bytes_sent.py`, which a run equals; seconds are the
planner's estimate. `side_of` is the one place that says what is known of a plan by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.core.axis import MESH_AXES, Axis
from echelon.core.plan import Plan
from echelon.cost.bytes_held import held_buckets, held_terms
from echelon.cost.bytes_sent import bytes_sent_alike
from echelon.cost.data_bytes import muon_bytes
from echelon.cost.muon import muon_exchange
from echelon.cost.stage import expert_index_of, pp_rank_of
from echelon.cost.terms import HeldTerm
from echelon.cost.transient import held_at_most
from echelon.planner.estimate import estimate
from echelon.planner.export.settings import plan_settings

MATHEMATICS = ("model", "batch", "precision", "optimizer", "train.seed", "train.steps")
BALANCE = (
    "experts.balance",
    "experts.aux_coefficient",
    "experts.aux_over",
    "experts.z_coefficient",
    "experts.bias_rate",
    "experts.capacity_factor",
    "experts.drop",
    "experts.route",
)
LAYOUT = ("batch.microbatch_sequences",)
NAMES = ("train.run_name",)
CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Name a setting that two plans have otherwise; None is a setting that one does not have."""

    setting: str
    a: object
    b: object
    changes_numbers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Hold what is known of a plan: bytes of the rank that holds most, and sends most; seconds.

    `held` are those between steps by kind, `step` what a step adds at most beside activations,
    `sent` those of a step by axis. `seconds` are those of a step by term, estimated.
    """

    plan: Plan
    held: Mapping[str, int]
    step: Mapping[str, int]
    sent: Mapping[str, int]
    seconds: Mapping[str, float]

    def bytes(self) -> Mapping[str, Mapping[str, int]]:
        """Return all bytes that are compared term by term."""
        return {"held": self.held, "step": self.step, "sent": self.sent}

    def parts(self) -> Mapping[str, Mapping[str, float]]:
        """Return everything that is compared term by term."""
        return {**self.bytes(), "seconds": self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hold two plans, what differs, and whether both must give the same numbers."""

    a: Side
    b: Side
    differences: tuple[Difference, ...]

    @property
    def same_mathematics(self) -> bool:
        """Return whether both plans must give the same numbers."""
        return self.a.plan.same_mathematics(self.b.plan)

    @property
    def same_layout(self) -> bool:
        """Return whether both plans are split alike."""
        return self.a.plan.layout == self.b.plan.layout


def compare_plans(a: Plan, b: Plan) -> Comparison:
    """Return two plans side by side."""
    return Comparison(a=side_of(a), b=side_of(b), differences=tuple(_differences(a, b)))


def side_of(plan: Plan) -> Side:
    """Return what is known of a plan by itself."""
    others = [axis for axis in MESH_AXES if axis is not Axis.PP]
    places = plan.mesh.groups(*others)
    held = [_held(plan, ranks) for ranks in places]
    step = [_by_kind(held_at_most(plan, pp_rank_of(plan, ranks[0]))) for ranks in places]
    sent = [_sent(plan, ranks) for ranks in places]
    return Side(
        plan=plan,
        held=_most(held),
        step=_most(step),
        sent=_most(sent),
        seconds=estimate(plan).seconds,
    )


def changes_numbers(key: str) -> bool:
    """Return whether a setting is one of the mathematics of a plan."""
    if key in LAYOUT:
        return False
    return key in BALANCE or any(key == one or key.startswith(f"{one}.") for one in MATHEMATICS)


def _differences(a: Plan, b: Plan) -> Iterator[Difference]:
    ours, theirs = plan_settings(a), plan_settings(b)
    for key in dict.fromkeys((*ours, *theirs)):
        if key not in NAMES and ours.get(key) != theirs.get(key):
            yield Difference(
                setting=key,
                a=ours.get(key),
                b=theirs.get(key),
                changes_numbers=changes_numbers(key),
            )
    if a.layout.pipeline.rows != b.layout.pipeline.rows:
        rows = [
            f"{sum(len(row.split()) for row in p.layout.pipeline.rows)} actions" for p in (a, b)
        ]
        yield Difference(setting="pipeline.file", a=rows[0], b=rows[1], changes_numbers=False)
    if a.cluster != b.cluster:
        names = a.cluster.name, b.cluster.name
        yield Difference(setting=CLUSTER, a=names[0], b=names[1], changes_numbers=False)


def _held(plan: Plan, ranks: Sequence[int]) -> dict[str, int]:
    """Return what a rank at a place of the pipeline holds: all of them hold as much."""
    buckets = held_buckets(plan, pp_rank_of(plan, ranks[0]))
    return _by_kind(held_terms(plan, buckets, ranks[0]))


def _by_kind(terms: Sequence[HeldTerm]) -> dict[str, int]:
    """Return bytes by kind; what rests off the device says where."""
    total: dict[str, int] = {}
    for term in terms:
        name = term.name if term.pool == "device" else f"{term.name} ({term.pool})"
        total[name] = total.get(name, 0) + term.bytes
    return total


def _sent(plan: Plan, ranks: Sequence[int]) -> dict[str, int]:
    """Return what the rank that sends most sends, of those at a place of the pipeline."""
    pp_rank = pp_rank_of(plan, ranks[0])
    by_context = [bytes_sent_alike(plan, pp_rank, cp_rank) for cp_rank in range(plan.mesh.cp)]
    alike = max(by_context, key=lambda terms: sum(term.bytes for term in terms))
    total: dict[str, int] = {}
    for term in alike:
        total[term.axis] = total.get(term.axis, 0) + term.bytes
    for axis, count in _muon(plan, pp_rank, ranks).items():
        total[axis] = total.get(axis, 0) + count
    return total


def _muon(plan: Plan, pp_rank: int, ranks: Sequence[int]) -> dict[str, int]:
    """Return the bytes of Muon's matrices by axis, of the rank that sends most of them."""
    if plan.mathematics.optimizer.kind != "muon":
        return {}
    shares = {rank: expert_index_of(plan, rank) for rank in ranks}
    exchanges = {share: muon_exchange(plan, pp_rank, share) for share in {*shares.values()}}
    found: list[dict[str, int]] = []
    for rank, share in shares.items():
        total: dict[str, int] = {}
        for term in muon_bytes(plan, exchanges[share], rank):
            if term.bytes:
                total[term.axis] = total.get(term.axis, 0) + term.bytes
        found.append(total)
    return _most(found)


def _most(found: Sequence[dict[str, int]]) -> dict[str, int]:
    return max(found, key=lambda one: sum(one.values()))
