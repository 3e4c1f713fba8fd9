# SPDX-License-Identifier: Apache-2.0
"""What a wrong update looks like that was made from another state: an older one, another tensor's.

State that rests in slices, buffers and files can be read too early, written too late, or read from
another place. So the formula is run again with the value or a running sum as they were some updates
ago, or as those of another tensor of the same shape are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from echelon.core.plan import Plan
from echelon.layout.stage import update_rule_of
from echelon.proof.claims.wrong_factors import EXPLAINED, nearly_equal
from echelon.proof.diagnose.diagnosis import ProofFinding
from echelon.proof.diagnose.optimizer_constants import ReplayedUpdate
from echelon.proof.oracle.optimizers import OptimizerState

_VALUE = "value"

_WORDS = {"exp_avg": "first moment", "exp_avg_sq": "second moment"}
"""What users call the running sums of AdamW."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Hold what an optimizer keeps of a tensor at one time: the value, and sums by name."""

    value: torch.Tensor
    sums: Mapping[str, torch.Tensor]

    def with_parts_of(self, other: _Kept, parts: Sequence[str]) -> _Kept:
        """Return the same, but for the parts that are another's; a sum that is missing is zero."""
        sums = {name: other.sums[name] for name in parts if name in other.sums}
        own = {name: one for name, one in self.sums.items() if name not in parts}
        return _Kept(other.value if _VALUE in parts else self.value, {**own, **sums})


def explain_state(
    replayed: ReplayedUpdate, others: Sequence[ReplayedUpdate]
) -> Iterator[ProofFinding]:
    """Find the state of an earlier update, or of one of `others`, behind a wrong update.

    What follows for all of `replayed.where` must follow from it.
    """
    *before, now, _ = kept = _history(replayed)
    parts = (*_sums_of(kept), _VALUE)
    for ago, one in enumerate(reversed(before), start=1):
        for taken in _subsets(parts):
            if _fits(replayed, now.with_parts_of(one, taken)):
                when = f"as of {ago} update{'s' * (ago > 1)} before"
                zero = " (zero)" if ago == len(before) and _VALUE not in taken else ""
                yield ProofFinding("stale", f"made from the {_told(taken)} {when}{zero}")
                return
    for other in others:
        *_, then, after = _history(other)
        for one, taken in ((one, taken) for one in (then, after) for taken in _subsets(parts)):
            if _fits(replayed, now.with_parts_of(one, taken)):
                when = ", as of after this step" if one is after else ""
                says = f"made from the {_told(taken)} of {other.spec.name}{when}"
                yield ProofFinding("another's state", says)
                return


def _history(replayed: ReplayedUpdate) -> list[_Kept]:
    """Return what was kept before each update that was taken, before the last, and after it."""
    state, name = OptimizerState(), replayed.spec.name
    kept: list[_Kept] = []
    for one in replayed.steps:
        last = one is replayed.steps[-1]
        if last or not one.skipped:
            kept.append(_Kept(one.before[name], dict(state.sums)))
            replayed.update(one, replayed.optimizer, state)
    last = replayed.last
    return [*kept, _Kept(last.after[name], dict(state.sums))]


def _fits(replayed: ReplayedUpdate, kept: _Kept) -> bool:
    count = sum(not one.skipped for one in replayed.steps[:-1])
    state = OptimizerState(sums=dict(kept.sums), num_updates=count)
    made = replayed.update(replayed.last, replayed.optimizer, state, kept.value)
    right = replayed.last.before[replayed.spec.name]
    return replayed.fits(kept.value + made.total - right) < EXPLAINED


def _sums_of(kept: Sequence[_Kept]) -> list[str]:
    return list(dict.fromkeys(name for one in kept for name in one.sums))


def _subsets(parts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield what may be another's: all of it first, then the sums, then less."""
    for number in range(len(parts), 0, -1):
        yield from combinations(parts, number)


def _told(parts: Sequence[str]) -> str:
    *most, last = (_WORDS.get(part, part) for part in parts)
    return f"{', '.join(most)} and {last}" if most else last


def explain_muon_scale(replayed: ReplayedUpdate, plan: Plan, factor: float) -> ProofFinding | None:
    """Return that an orthogonal update has the scale of a tensor-parallel slice, where it has."""
    spec, tp = replayed.spec, plan.mesh.tp
    if update_rule_of(replayed.optimizer, spec) != "muon" or spec.split_dim is None or tp == 1:
        return None
    local = spec.local_shape(tp)
    if nearly_equal(factor, 1.0) or not nearly_equal(factor**2, max(local) / max(spec.shape)):
        return None
    here, whole = ("x".join(map(str, shape)) for shape in (local, spec.shape))
    says = f"scaled by the longer side of the slice, {here}, instead of the matrix, {whole}"
    return ProofFinding("local scale", says, "tp", value=factor)
