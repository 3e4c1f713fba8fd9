# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis says: the first wrong thing, its factor, and the axis that it points to.

The axis is the one along which wrong and right ranks have no place in common. Of several causes
that fit the first wrong tensor, the cause that fits the most other wrong tensors is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.evidence.mesh import AxisGroups, group_of

ROUNDING = "right but for rounding"


@dataclass(frozen=True, slots=True)
class ProofFinding:
    """Name what an error looks like.

    `factor` is a word ("2", "1/dp", "token ratio", "sign", "zero", "missing sum", ...), `value`
    the number behind it where there is one, `axis` the axis that it points to ("" for none),
    `residual` what the explanation leaves unexplained, relative. `tensor` is what it is told under
    ("" for what was compared), `ranks` are those that have it wrong, where they are known.
    """

    factor: str
    description: str
    axis: str = ""
    _: KW_ONLY
    value: float | None = None
    residual: float = 0.0
    tensor: str = ""
    ranks: tuple[int, ...] = ()


MOST_OTHERS = 8
"""Other wrong tensors that a cause must explain, too."""

VAGUE = ("none", "slice")
"""Factors without an explanation."""

_MEASURED = ("number", "weight decay", "undue decay", "rate and decay", "epsilon")
"""Factors that are the same cause only with the same value."""

_NAMELESS = ("number", *VAGUE)

_Cause = tuple[str, str, str]
"""Factor, axis, and value if it is measured: the same for each tensor that a cause explains."""

OtherCauses = Callable[[], Iterable[tuple[str, Iterable[ProofFinding]]]]
"""Names of other wrong tensors or numbers, each with the causes that fit it."""


def _cause(finding: ProofFinding) -> _Cause:
    measured = finding.factor in _MEASURED and finding.value is not None
    return finding.factor, finding.axis, f"{finding.value:.4g}" if measured else ""


def most_telling(causes: Iterable[ProofFinding], elsewhere: OtherCauses) -> ProofFinding | None:
    """The cause that explains the most other wrong tensors; the first of equals, None of none.

    A number of few elements fits any factor. If a factor without a name explains one tensor alone,
    a cause that most other tensors share is reported, for the first tensor that shows it.
    """
    fitting: dict[_Cause, ProofFinding] = {}
    for finding in causes:
        fitting.setdefault(_cause(finding), finding)
    if not fitting:
        return None
    by_name = {
        name: {_cause(finding): replace(finding, tensor=finding.tensor or name) for finding in fits}
        for name, fits in elsewhere()
    }
    votes = Counter(cause for fits in by_name.values() for cause in fits)
    best = max(fitting, key=lambda cause: votes[cause])
    finding = fitting[best]
    shared = max(votes, key=lambda cause: votes[cause], default=best)
    if best[0] == "number" and not votes[best] and votes[shared] > len(by_name) / 2:
        shown = next(fits[shared] for fits in by_name.values() if shared in fits)
        says = f"{shown.description}; so are {votes[shared]} of {len(by_name)} other wrong tensors"
        return replace(shown, description=says)
    in_another_way = {
        name: fits
        for name, fits in by_name.items()
        if best not in fits and any(factor not in _NAMELESS for factor, *_ in fits)
    }
    if not in_another_way or votes[best] >= len(in_another_way):
        return finding
    name, fits = next(iter(in_another_way.items()))
    says = (
        f"{finding.description}; {len(in_another_way)} of {len(by_name)} other wrong tensors are "
    )
    says += f"wrong in another way ({name}: {next(iter(fits.values())).description})"
    return replace(finding, description=says)


def spread(names: Sequence[str]) -> Sequence[str]:
    """At most about `MOST_OTHERS` of these names, from all over."""
    return names[:: max(1, -(-len(names) // MOST_OTHERS))]


def no_cause(left: Mapping[str, float]) -> str:
    """Sentence that no cause fits, with the share that each tried cause leaves unexplained."""
    shares = ", ".join(f"{cause} {100 * share:.3g} %" for cause, share in left.items())
    return f"no cause fits; excluded, with the part that each leaves: {shares}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Name the first wrong thing of a failed proof."""

    rule: str
    """Id of the rule that explains it."""
    step: int
    """The optimizer step."""
    tensor: str
    """Canonical name of the tensor; "" for a number."""
    where: str
    """Where the tensor is in the model, and how it is split."""
    factor: str
    """The factor by which it is, in words."""
    axis: str
    """The axis of the mesh that this points at."""
    value: float | None
    """The factor as a number, if there is one."""
    says: str
    """The sentence that users read."""
    residual: float
    """What is left where the factor is taken out, relative."""
    ranks: tuple[int, ...]
    """Ranks that have it wrong."""
    num_wrong: int
    """Tensors or numbers that are wrong."""
    num_compared: int
    """Tensors or numbers that were compared."""

    @classmethod
    def of(
        cls, result: ClaimResult, failure: Check, finding: ProofFinding, where: str
    ) -> Diagnosis:
        """Return the finding of a claim's failure; `where` says where its tensor is."""
        return cls(
            rule=result.rule.id,
            step=failure.step,
            tensor=finding.tensor or failure.subject,
            where=where,
            factor=finding.factor,
            axis=finding.axis,
            value=finding.value,
            says=finding.description,
            residual=finding.residual,
            ranks=finding.ranks,
            num_wrong=len({(one.step, one.subject) for one in result.failures}),
            num_compared=result.compared,
        )

    def sentence(self) -> str:
        """Return the diagnosis as one sentence."""
        axis = f" [axis {self.axis}]" if self.axis else ""
        place = f"{self.tensor} ({self.where})" if self.where else self.tensor
        return f"first wrong: {place}: {self.says}{axis}"


def distinguishing_axis(
    groups_of_axes: AxisGroups, wrong: Collection[int], right: Iterable[int]
) -> tuple[str, list[int]] | None:
    """Return an axis along which wrong and right ranks have no place in common, and the wrong's."""
    right = set(right) - set(wrong)
    if not wrong or not right:
        return None
    for axis, groups in groups_of_axes:
        places = [{group_of(groups, r).index(r) for r in ranks} for ranks in (wrong, right)]
        if not places[0] & places[1]:
            return axis, sorted(places[0])
    return None


def with_distinguishing_axis(
    groups_of_axes: AxisGroups,
    finding: ProofFinding,
    wrong: Collection[int],
    right: Iterable[int],
) -> ProofFinding:
    """Return the finding with the axis that tells right and wrong ranks apart, if one does."""
    told = distinguishing_axis(groups_of_axes, wrong, right)
    if told is None:
        return finding
    axis, places = told
    says = f"only on {axis} {places}: {finding.description}"
    return replace(finding, description=says, axis=finding.axis or axis)
