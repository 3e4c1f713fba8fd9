# SPDX-License-Identifier: Apache-2.0
"""Where a forward or backward pass goes wrong: between which two places, and in which way.

The first wrong activation in the order of the pass has right ones before it, so what is between
makes the mistake. What it looks like is told by what it is compared with: a factor, the sum of
copies, rows of other tokens, what another block reads, the same norm with other constants.

Shape suffixes: B sequences, T positions, N = B * T tokens, n those of a rank, W numbers of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from echelon.models.decoder import FINAL_NORM, INPUT, OUTPUT
from echelon.proof.causes.factors import common_factor, named_factor
from echelon.proof.causes.finding import ProofFinding, no_cause, with_distinguishing_axis
from echelon.proof.causes.forward.losses import explain_microbatch_losses
from echelon.proof.causes.forward.row_pieces import chunk_variants, row_piece_variants
from echelon.proof.causes.gradients.gradients import missing_sums
from echelon.proof.causes.gradients.norm_layers import explain_norm_layer
from echelon.proof.causes.places import places_of_tokens, told_by_slice, wrong_elements
from echelon.proof.causes.token_ranks import token_rows
from echelon.proof.claims.checks import (
    ActivationCopy,
    Check,
    activation_gradients,
    copies_at,
    whole_activation,
)
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.fits import (
    EXPLAINED,
    fit_basis,
    fit_factor,
    nearly_equal,
    relative_residual,
)
from echelon.proof.evidence.mesh import group_of, named_groups
from echelon.proof.oracle.oracle import OracleStep, hearing, loss_of_tokens

_SAME = 1e-9  # relative difference

_ROUTER_PARTS = ("scores", "gates")

_POWERS = ("1", "the right gradient", "its square", "its cube")
"""What a wrong gradient may be a sum of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongActivation:
    """Hold the first wrong activation of a step, and the copies of it that are wrong."""

    evidence: PlanEvidence
    oracle: OracleStep
    name: str
    copies: Sequence[ActivationCopy]
    wrong: Sequence[ActivationCopy]

    @property
    def right_BTW(self) -> torch.Tensor:
        """Return what one device has there."""
        return self.oracle.activations[self.name].double()

    def observed(self, name: str) -> torch.Tensor:
        """Return what the ranks have together at any boundary."""
        copies = copies_at(self.evidence.plan, self.evidence.run, self.oracle.step)
        return whole_activation(copies.get(name, []), self.oracle.activations[name])


def explain_activation(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return the mistake behind the first wrong activation, with where it is made."""
    oracle, name = evidence.steps[failure.step], failure.subject
    copies = copies_at(evidence.plan, evidence.run, failure.step).get(name, [])
    right_BTW = oracle.activations[name].double()
    allowed = failure.allowed * float(right_BTW.norm())
    wrong = [
        copy
        for copy in copies
        if copy.values_nW.shape[-1] == right_BTW.shape[-1]
        and not float((copy.values_nW - copy.right_rows(right_BTW)).norm()) <= allowed / 2
    ]
    activation = WrongActivation(
        evidence=evidence, oracle=oracle, name=name, copies=copies, wrong=wrong
    )
    place = _between(oracle, name)
    found = _by_losses(evidence, failure) or next(_findings(activation), None)
    if found is None:
        says = f"another function: {_direction(activation)}"
        if wrong:
            says += f"; {no_cause(_excluded(activation))}"
        found = ProofFinding("none", says)
        found = told_by_slice(found, _slice_of(activation, right_BTW))
    if not wrong:
        return ProofFinding("missing", failure.detail, tensor=tensor_at(name))
    ranks = tuple(sorted({copy.rank for copy in wrong}))
    told = replace(found, description=f"{found.description}; {place}", ranks=ranks)
    told = replace(told, tensor=found.tensor or tensor_at(name))
    holders = {copy.rank for copy in copies}
    return with_distinguishing_axis(evidence.axes(), told, ranks, holders)


def tensor_at(name: str) -> str:
    """Return the part of the model that is told for a boundary."""
    block, _, part = name.rpartition(".")
    if name == f"layers.0.{INPUT}":
        return "embedding"
    if part in (INPUT, OUTPUT):
        return block
    return f"{block}.mlp.router" if part in _ROUTER_PARTS else name


def describe_boundary(name: str) -> str:
    """Return a boundary in words."""
    if name == FINAL_NORM:
        return "the output of the last norm"
    block, _, part = name.rpartition(".")
    number = block.partition(".")[2]
    of = {INPUT: "the input", OUTPUT: "the output"}.get(part)
    if of is None and part in _ROUTER_PARTS:
        of = f"the {part} of the router"
    return f"{of or f'the output of {part}'} of block {number}"


def _between(oracle: OracleStep, name: str) -> str:
    names = list(oracle.activations)
    before = names.index(name) - 1
    if before < 0:
        return f"first wrong in {describe_boundary(name)}, the embedding itself"
    return f"first wrong in {describe_boundary(name)}, right in {describe_boundary(names[before])}"


def _by_losses(evidence: PlanEvidence, failure: Check) -> ProofFinding | None:
    """Find a known mistake that gives the losses of the microbatches, where they are told."""
    reported = evidence.run.microbatch_losses(failure.step)
    if not reported:
        return None
    finding = explain_microbatch_losses(evidence, failure)
    return None if finding.factor in ("none", "replicas differ") else finding


def _findings(activation: WrongActivation) -> Iterator[ProofFinding]:
    wrong = activation.wrong
    if not all(bool(copy.values_nW.isfinite().all()) for copy in wrong):
        yield ProofFinding("not finite", "not finite")
    if wrong and all(copy.recomputed for copy in wrong):
        routes = activation.name.endswith(_ROUTER_PARTS)
        factor = "routed anew" if routes else "recomputed otherwise"
        says = "right in the forward pass, and otherwise where it is recomputed in backward"
        yield ProofFinding(factor, says)
    yield from _missing_sum(activation)
    yield from _scalar(activation)
    yield from _block_order(activation)
    yield from _other_tokens(activation)
    yield from explain_norm_layer(activation.oracle, activation.name, wrong, activation.evidence)
    yield from _dropped_otherwise(activation)
    yield from _turned(activation)
    yield from _in_pieces(activation)


def _in_pieces(activation: WrongActivation) -> Iterator[ProofFinding]:
    """Find a mistake in a piece or a chunk of rows that gives the wrong rows, and no others."""
    evidence, oracle, name = activation.evidence, activation.oracle, activation.name
    plan = evidence.reference_plan
    if not activation.wrong or not name.endswith((".attention", ".mlp")):
        return
    pieces = row_piece_variants(plan) if name.endswith(".attention") else ()
    for variant in chain(chunk_variants(evidence.plan), pieces):
        model = variant.build(plan, oracle)
        with torch.no_grad(), hearing(model) as heard:
            loss_of_tokens(plan, model, oracle)
        made_BTW = heard.forward[name].double()
        copies = [(copy.values_nW, copy.right_rows(made_BTW)) for copy in activation.wrong]
        if all(_same(seen, made) for seen, made in copies):
            yield replace(variant.finding, tensor=tensor_at(name))
            return


def _slice_of(
    activation: WrongActivation, right_BTW: torch.Tensor, *, kind: str = "activations"
) -> str:
    """Return which tokens, or columns of them, are wrong where the others are right."""
    seen_BTW = whole_activation(list(activation.wrong), right_BTW)
    told_BT = torch.isfinite(seen_BTW).any(-1)
    seen_BTW[~told_BT] = right_BTW[~told_BT]
    rows = token_rows(activation.evidence.plan)
    rows_BT = rows.row_N.view(right_BTW.shape[1], right_BTW.shape[0]).T
    allowed = activation.evidence.tolerance.allowed(kind, activation.oracle.step, activation.name)
    return next(places_of_tokens(wrong_elements(seen_BTW, right_BTW, allowed), rows_BT), "")


def _missing_sum(activation: WrongActivation) -> Iterator[ProofFinding]:
    """Find copies that differ along one axis and add up to the right rows."""
    copies = [copy for copy in activation.wrong if not copy.recomputed]
    right_BTW = activation.right_BTW
    held = {
        rank: whole_activation([c for c in copies if c.rank == rank], right_BTW).flatten()
        for rank in dict.fromkeys(copy.rank for copy in copies)
    }
    if held:
        groups = named_groups(activation.evidence.plan)
        yield from missing_sums(groups, held, right_BTW.flatten(), EXPLAINED)


def _scalar(activation: WrongActivation) -> Iterator[ProofFinding]:
    if any(not float(copy.values_nW.norm()) for copy in activation.wrong):
        yield ProofFinding("zero", "zero", value=0.0)
        return
    right_BTW = activation.right_BTW
    fits = [fit_factor(copy.values_nW, copy.right_rows(right_BTW)) for copy in activation.wrong]
    common = common_factor(fits, EXPLAINED)
    if common and not nearly_equal(common[0], 1.0):
        yield named_factor(activation.evidence, activation.oracle, *common, of="forward")


def _block_order(activation: WrongActivation) -> Iterator[ProofFinding]:
    """Find a block that reads what another one should."""
    right = activation.oracle.activations
    inputs = [name for name in right if name.endswith(f".{INPUT}")]
    seen = {name: activation.observed(name) for name in inputs}
    for mine in inputs:
        for other in inputs:
            if mine != other and _same(seen[mine], right[other].double()):
                i, j = (name.split(".")[1] for name in (mine, other))
                says = f"block {i} reads what block {j} should: blocks in another order"
                yield ProofFinding("order of blocks", says, tensor=f"layers.{i}")
                return


def _same(observed: torch.Tensor, right: torch.Tensor) -> bool:
    return relative_residual(observed, right) < _SAME


def _other_tokens(activation: WrongActivation) -> Iterator[ProofFinding]:
    """Find rows that are right, but of other tokens."""
    right_NW = activation.right_BTW.flatten(0, 1)
    length = activation.right_BTW.shape[1]
    moves: dict[str, int] = {}
    for copy in activation.wrong:
        scale_n = copy.values_nW.norm(dim=-1)
        off_n = (copy.values_nW - right_NW[copy.place_n]).norm(dim=-1) > _SAME * scale_n
        rows_nW, place_n = copy.values_nW[off_n], copy.place_n[off_n]
        far_nN = torch.cdist(rows_nW, right_NW, compute_mode="donot_use_mm_for_euclid_dist")
        distance, source_n = far_nN.min(-1)
        if bool((distance > _SAME * scale_n[off_n]).any()):
            return
        sequences = source_n // length == place_n // length
        for same, by in zip(sequences.tolist(), (source_n - place_n).tolist(), strict=True):
            what = f"{abs(by)} position{'s' * (abs(by) > 1)} {'later' if by > 0 else 'earlier'}"
            moves[what if same else "another sequence"] = moves.get(what, 0) + 1
    if moves:
        most = max(moves, key=lambda what: moves[what])
        where = most if most == "another sequence" else f"of the token {most}"
        says = f"rows of other tokens ({where})" if len(moves) == 1 else "rows of other tokens"
        yield ProofFinding("another token's", says)


def _dropped_otherwise(activation: WrongActivation) -> Iterator[ProofFinding]:
    """Find rows that are right but for single elements, where only dropout is between."""
    model = activation.evidence.plan.model
    after_dropout = activation.name.endswith((".mlp_norm", f".{OUTPUT}", f"layers.0.{INPUT}"))
    if not model.dropout or not after_dropout:
        return
    few, many = 0, 0
    for copy in activation.wrong:
        right_nW = copy.right_rows(activation.right_BTW)
        ratio_nW = copy.values_nW / right_nW
        row_n1 = ratio_nW.nanmedian(-1, keepdim=True).values
        same_nW = (ratio_nW - row_n1).abs() <= _SAME * row_n1.abs()
        same_nW |= (copy.values_nW == 0) & (right_nW == 0)
        few, many = few + int(same_nW.sum()), many + same_nW.numel()
    if many and few > many / 2:
        says = f"{many - few} of {many} elements are dropped otherwise"
        yield ProofFinding("dropout", says)


def _turned(activation: WrongActivation) -> Iterator[ProofFinding]:
    """Find rows with the right numbers in another order, or of the right length."""
    pairs = [(one.values_nW, one.right_rows(activation.right_BTW)) for one in activation.wrong]
    if not pairs:
        return
    if all(_same(seen.sort(-1).values, right.sort(-1).values) for seen, right in pairs):
        yield ProofFinding("columns permuted", "the right numbers of each token in another order")
    elif all(_same(seen.norm(dim=-1), right.norm(dim=-1)) for seen, right in pairs):
        yield ProofFinding("rotated", "of the right length for each token, in another direction")


def _excluded(activation: WrongActivation) -> Mapping[str, float]:
    """The causes tried on an activation, each with the share that it leaves unexplained."""
    right_BTW = activation.right_BTW
    pairs = [(copy.values_nW, copy.right_rows(right_BTW)) for copy in activation.wrong]
    seen_nW, right_nW = (torch.cat(some) for some in zip(*pairs, strict=True))
    held = {
        rank: whole_activation([c for c in activation.wrong if c.rank == rank], right_BTW)
        for rank in dict.fromkeys(copy.rank for copy in activation.wrong)
    }
    left = {"a factor": fit_factor(seen_nW, right_nW)[1]}
    for axis, groups in named_groups(activation.evidence.plan):
        copies = [held[rank] for rank in group_of(groups, min(held)) if rank in held]
        if len(copies) > 1:
            total_BTW = torch.stack(copies).nan_to_num(0.0).sum(0)
            left[f"a sum over {axis}"] = relative_residual(total_BTW, right_BTW)
    in_order = (seen_nW.sort(-1).values, right_nW.sort(-1).values)
    left["another order of columns"] = relative_residual(*in_order)
    left["another direction"] = relative_residual(seen_nW.norm(dim=-1), right_nW.norm(dim=-1))
    return {cause: share for cause, share in left.items() if math.isfinite(share)}


def _direction(activation: WrongActivation) -> str:
    """Return how the wrong copy that is furthest off lies to the right one."""
    if not activation.wrong:
        return "nothing is told"
    pairs = [(one.values_nW, one.right_rows(activation.right_BTW)) for one in activation.wrong]
    seen, right = max(pairs, key=lambda pair: float((pair[0] - pair[1]).norm()))
    size, length = float(seen.norm()), float(right.norm())
    cosine = float((seen * right).sum()) / (size * length) if size and length else 0.0
    rows = int(((seen - right).norm(dim=-1) > _SAME * right.norm(dim=-1)).sum())
    larger = f"{size / length:.4g} times as large" if length else "not zero"
    return (
        f"{larger}, at a cosine of {cosine:.4g} to the right one, for {rows} of {len(seen)} tokens"
    )


def explain_backward(evidence: PlanEvidence, step: int) -> ProofFinding | None:
    """Return where a backward pass is first wrong, and as what; None where it is right."""
    place = backward_place(evidence, step)
    if place is None:
        return None
    name, says = place
    oracle = evidence.steps[step]
    right_BTW = oracle.activation_gradients[name].double()
    copies = copies_at(evidence.plan, evidence.run, step, gradient=True).get(name, [])
    copies = [one for one in copies if one.values_nW.shape[-1] == right_BTW.shape[-1]]
    wrong = [one for one in copies if not _same(one.values_nW, one.right_rows(right_BTW))]
    found = ProofFinding("none", "another backward pass")
    if wrong:
        activation = WrongActivation(
            evidence=evidence, oracle=oracle, name=name, copies=copies, wrong=wrong
        )
        found = _function_of(activation, right_BTW) or told_by_slice(
            found, _slice_of(activation, right_BTW, kind="activation gradients")
        )
    return replace(found, tensor=tensor_at(name), description=f"{found.description}; {says}")


def _function_of(activation: WrongActivation, right_BTW: torch.Tensor) -> ProofFinding | None:
    """Find a polynomial that makes the wrong gradient of the right one, element by element."""
    seen = torch.cat([copy.values_nW.flatten() for copy in activation.wrong])
    right = torch.cat([copy.right_rows(right_BTW).flatten() for copy in activation.wrong])
    factor, residual = fit_factor(seen, right)
    if residual < EXPLAINED:
        return named_factor(activation.evidence, activation.oracle, factor, residual)
    # All powers about as long: the fit is as sharp for each.
    unit = float(right.abs().max()) or 1.0
    powers = [(right / unit) ** power for power in range(len(_POWERS))]
    weights, residual = fit_basis(seen, powers)
    if residual >= EXPLAINED:
        return None
    told = [
        f"{weight / unit**power:.6g} x {words}"
        for power, (weight, words) in enumerate(zip(weights, _POWERS, strict=True))
        if abs(weight) > EXPLAINED * max(map(abs, weights))
    ]
    says = f"element by element it is {' + '.join(told)}: no linear backward pass"
    return ProofFinding("not linear", says, residual=residual)


def backward_place(evidence: PlanEvidence, step: int) -> tuple[str, str] | None:
    """Return the boundary where a backward pass is first wrong, and in words from where on."""
    failures: Mapping[int, Check] = {
        check.position: check
        for check in activation_gradients(evidence)
        if check.step == step and not check.error <= check.allowed
    }
    if not failures:
        return None
    names = list(evidence.steps[step].activation_gradients)
    first = min(failures)
    says = f"backward is first wrong in the gradient of {describe_boundary(names[first])}"
    if first:
        says += f", right in that of {describe_boundary(names[first - 1])}"
    return names[first], says
