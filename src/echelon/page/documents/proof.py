# SPDX-License-Identifier: Apache-2.0
"""The sections of a proof: its claims by precision, and the first wrong tensor.

They are read from the object that `proof.json` holds, so a proof that was just made and one in the
folder of a run look the same. The text of a proof has the claims by precision, the page all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echelon.planner.view.document import (
    DataTable,
    Fact,
    HeatFigure,
    HeatRow,
    PageDocument,
    Section,
)

_HEAD = ("claim", "precision", "compared", "off by", "may be off by", "worst", "holds")
MOST_RANKS_SHOWN = 64  # ranks
_BESIDE = {
    "independent": "the one process beside an independent implementation",
    "whole_run": "a whole run of the trainer beside one process",
    "resumed": "the trainer in the run's own precision",
    "data": "the data of the run compared with its records",
}
"""Passes that judge other code than the steps of the ranks."""


def proof_page(proof: Mapping[str, Any]) -> PageDocument:
    """Return the page of a proof alone, from the object that `proof.json` holds."""
    proven = bool(proof["proven"])
    compared = sum(int(claim["compared"]) for _, claim in _claims(proof))
    return PageDocument(
        title=f"{proof['plan']}: proof",
        subject=f"{proof['mesh']} beside one process; plan {str(proof['plan_hash'])[:12]}",
        verdict=verdict_of_proof(proof),
        good=proven,
        facts=(
            Fact("steps", str(proof["num_steps"])),
            Fact("seed", str(proof["seed"])),
            Fact("tensors and numbers compared", f"{compared:,}"),
        ),
        sections=proof_sections(proof),
    )


def verdict_of_proof(proof: Mapping[str, Any]) -> str:
    """Return in a sentence whether ranks computed what one process computes."""
    if proof["proven"]:
        return "Proven: the ranks compute what one process computes, in every precision."
    failed = [claim for _, claim in _claims(proof) if not claim["holds"]]
    says = next((one["diagnosis"]["says"] for one in _passes(proof) if one["diagnosis"]), "")
    more = f" {says}" if says else ""
    return f"Not proven: {len(failed)} claims do not hold.{more}"


def proof_sections(proof: Mapping[str, Any]) -> tuple[Section, ...]:
    """Return the claims in tables and, where one fails, the ranks that have it wrong."""
    found = [_errors_section(proof), *claims_sections(proof)]
    for one in _passes(proof):
        if one["diagnosis"]:
            found.append(_wrong_section(proof, one))
            break
    return tuple(found)


def claims_sections(proof: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the claims of the ranks' own steps, and of each pass next to them, by precision.

    A claim that one precision has no use for (a master copy where nothing is rounded) has no entry
    there. The proof may be of a program that is not ours.
    """
    yield Section(
        id="proof-claims",
        title="Claims by precision",
        summary=_head(proof),
        table=_by_precision(proof["passes"]),
        notes=_notes(proof.get("left_out", ())),
    )
    for name, head in _BESIDE.items():
        if one := proof.get(name):
            yield Section(
                id=f"proof-{name.replace('_', '-')}",
                title=f"{head[0].upper()}{head[1:]}",
                summary=head,
                table=_by_precision([one]) if one["claims"] else None,
                notes=(one["note"],) if one.get("note") else (),
            )


def _notes(left_out: Sequence[str]) -> tuple[str, ...]:
    """The parts that a quick proof leaves out, in a sentence; none of a whole one."""
    return (f"A quick proof. It leaves out {', '.join(left_out)}.",) if left_out else ()


def _head(proof: Mapping[str, Any]) -> str:
    """What was proven, over how many steps."""
    steps = f"{proof['num_steps']} steps, seed {proof['seed']}"
    if "file" in proof:
        return (
            f"{proof['file']}: {proof['mesh']} beside one device, {steps}; "
            f"{proof['num_parameters']} parameters of {proof['num_elements']} elements, placement "
            f"read from {proof['framework']}"
        )
    model = proof["shrunk_plan"]["mathematics"]["model"]
    return (
        f"{proof['plan']}: {proof['mesh']} beside one process, {steps}; {model['layers']} blocks x "
        f"{model['hidden']} wide in place of the model{_changed(proof.get('changes', ()))}"
    )


def _changed(changes: Sequence[Mapping[str, Any]]) -> str:
    """Numbers that the small plan changes, on a line; the heads of the table name dtypes."""
    texts = [
        f"{change['name']} {_short(change['given'])} -> {_short(change['proven'])}"
        for change in changes
        if not isinstance(change["proven"], str)
    ]
    return f"\nchanged: {', '.join(texts)}" if texts else ""


def _short(value: object) -> str:
    """A value in few words: the length of each inner list."""
    if isinstance(value, list | tuple):
        parts = [str(len(part) if isinstance(part, list | tuple) else part) for part in value]
        return f"[{', '.join(parts)}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _by_precision(passes: Sequence[Mapping[str, Any]]) -> DataTable:
    """Errors of claims, a column for each precision."""
    by_pass = [{str(claim["statement"]): claim for claim in one["claims"]} for one in passes]
    longest_first = sorted(by_pass, key=len, reverse=True)
    every = dict.fromkeys(statement for claims in longest_first for statement in claims)
    rows = [
        (
            statement,
            max(claims[statement]["compared"] for claims in by_pass if statement in claims),
            *(_outcome(claims[statement]) if statement in claims else "-" for claims in by_pass),
        )
        for statement in every
    ]
    return DataTable.of(("claim", "compared", *(one["precision"] for one in passes)), rows)


def _outcome(claim: Mapping[str, Any]) -> str:
    error, allowed = float(claim["max_error"]), float(claim["allowed"])
    mark = "" if claim["holds"] else "  FAILS"
    note = f" ({claim['note']})" if claim["note"] else ""
    if allowed == 0:
        return (f"off by {error:.1e}" if error else "equal") + note + mark
    return f"{error:.1e} of {allowed:.1e}{note}{mark}"


def _errors_section(proof: Mapping[str, Any]) -> Section:
    holds = sum(claim["holds"] for _, claim in _claims(proof))
    of = len(_claims(proof))
    return Section(
        id="proof",
        title="The proof",
        summary=f"{holds} of {of} claims hold beside one process, over {proof['num_steps']} steps.",
        figure=_used_figure(proof),
        table=DataTable(
            head=_HEAD,
            rows=tuple(_row(precision, claim) for precision, claim in _claims(proof)),
            right=(2, 3, 4),
        ),
    )


def _used_figure(proof: Mapping[str, Any]) -> HeatFigure:
    """Return how much of what it may be off by each claim is off by, in each precision."""
    columns = tuple(dict.fromkeys(str(one["precision"]) for one in _passes(proof)))
    by_claim: dict[str, dict[str, Mapping[str, Any]]] = {}
    for precision, claim in _claims(proof):
        by_claim.setdefault(str(claim["statement"]), {})[precision] = claim
    return HeatFigure(
        columns=columns,
        rows=tuple(
            HeatRow(
                label=statement,
                values=tuple(_used(found.get(one)) for one in columns),
                texts=tuple(_used_text(found.get(one)) for one in columns),
            )
            for statement, found in by_claim.items()
        ),
        most=1.0,
        legend="How much of what it may be off by a claim is off by; full where it does not hold",
    )


def _used(claim: Mapping[str, Any] | None) -> float | None:
    """Return the error of a claim over what is allowed, 1 where it does not hold."""
    if claim is None:
        return None
    if not claim["holds"]:
        return 1.0
    error, allowed = claim["max_error"], claim["allowed"]
    if not (isinstance(error, float | int) and isinstance(allowed, float | int)) or allowed <= 0:
        return 0.0
    return min(error / allowed, 1.0)


def _used_text(claim: Mapping[str, Any] | None) -> str:
    used = _used(claim)
    if claim is None or used is None:
        return "-"
    if not claim["holds"]:
        return "NO"
    return f"{100 * used:.2g} %" if used else "equal"


def _wrong_section(proof: Mapping[str, Any], failed: Mapping[str, Any]) -> Section:
    """Return the first wrong tensor as a row of ranks, dark where it is wrong."""
    diagnosis = failed["diagnosis"]
    wrong = set(diagnosis["ranks"])
    count = _world_size(proof)
    shown = range(min(count, MOST_RANKS_SHOWN))
    tensor = diagnosis["tensor"] or "the number"
    value = diagnosis["value"]
    factor = f"its factor is {value:g}; " if isinstance(value, float | int) else ""
    more = f", the first {len(shown)} of {count} ranks" if len(shown) < count else ""
    return Section(
        id="first-wrong",
        title="What is wrong first",
        summary=f"Step {diagnosis['step']}: {tensor}: {diagnosis['says']} ({factor}"
        f"{diagnosis['num_wrong']} of {diagnosis['num_compared']} are wrong in "
        f"{failed['precision']}).",
        figure=HeatFigure(
            columns=tuple(f"rank {rank}" for rank in shown),
            rows=(
                HeatRow(
                    label=tensor,
                    values=tuple(float(rank in wrong) for rank in shown),
                    texts=tuple("wrong" if rank in wrong else "right" for rank in shown),
                ),
            ),
            most=1.0,
            legend=f"Ranks that have it wrong{more}; rule {diagnosis['rule']}",
        ),
        table=_failures(failed),
        commands=(f"echelon explain {diagnosis['rule']}",),
    )


def _failures(failed: Mapping[str, Any]) -> DataTable:
    rows = [
        (
            claim["statement"],
            str(one["step"]),
            str(one["subject"]),
            _error(one["error"]),
            _error(one["allowed"]),
            str(one["detail"]),
        )
        for claim in failed["claims"]
        for one in claim["failures"][:8]
    ]
    head = ("claim", "step", "tensor", "off by", "may be off by", "detail")
    return DataTable(head=head, rows=tuple(rows), right=(1, 3, 4))


def _row(precision: str, claim: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(claim["statement"]) + (f" ({claim['note']})" if claim["note"] else ""),
        precision,
        f"{claim['compared']:,}",
        _error(claim["max_error"]),
        _error(claim["allowed"]),
        str(claim["worst"]),
        "yes" if claim["holds"] else f"NO: {claim['rule']}",
    )


def _error(value: object) -> str:
    if not isinstance(value, float | int):
        return str(value)
    return f"{value:.1e}" if value else "0"


def _world_size(proof: Mapping[str, Any]) -> int:
    mesh: Mapping[str, int] = proof["shrunk_plan"]["layout"]["mesh"]
    count = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        count *= int(mesh.get(axis, 1))
    return count


def _passes(proof: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    every = [*proof["passes"], *(proof.get(name) for name in _BESIDE)]
    return [one for one in every if one]


def _claims(proof: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(one["precision"], claim) for one in _passes(proof) for claim in one["claims"]]
