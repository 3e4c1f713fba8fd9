# SPDX-License-Identifier: Apache-2.0
"""Arguments of a program's attention compared with one device: masks, positions, heads, scale.

Only calls of `scaled_dot_product_attention` are seen. Values show which queries a rank has.
Rotated queries have the right lengths, and their angles show positions.

Shape suffixes: B sequences, H heads, T queries, S keys, d width of a head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch

from echelon.proof.causes.finding import ProofFinding, with_distinguishing_axis
from echelon.proof.causes.passing.places import Cut, PassedStep, cuts_of, sliced
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import relative_residual
from echelon.proof.evidence.run import AttentionArguments

_HEADS = 1  # dim
_TOKENS = 2  # dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedAttention:
    """Hold a call of a rank, the call of one device, and the part of its queries on the rank."""

    rank: int
    seen: AttentionArguments
    right: AttentionArguments
    cut: Cut
    fits: float
    rotated: bool

    def allowed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the masks of the rank and of one device, [B, 1, T, S].

        None where the keys are others, so that nothing can be compared.
        """
        whole, seen = _of_any_head(self.right.allowed), _of_any_head(self.seen.allowed)
        whole = whole.expand(len(self.right.q_BHTd), 1, -1, -1)
        whole = sliced(whole, tuple(part for part in self.cut if part[0] != _HEADS))
        return (seen.expand_as(whole), whole) if seen.shape[-2:] == whole.shape[-2:] else None


def _of_any_head(allowed: torch.Tensor) -> torch.Tensor:
    """Return a mask [T, S], [H, T, S] or [B, H, T, S] as [B or 1, 1, T, S]."""
    missing = _HEADS + 1 + _TOKENS - allowed.dim()
    return allowed[(None,) * missing].any(_HEADS, keepdim=True)


def explain_attention(evidence: CapturedEvidence, step: int) -> ProofFinding | None:
    """Return the first module whose attention is called otherwise, and how; None without one."""
    fits = PassedStep(evidence, step).fits
    calls = [call for call in evidence.passed.attention if call.step == step]
    count = Counter(call.name for call in calls)
    for right in (call for call in calls if count[call.name] == 1):
        pairs = [
            pair
            for capture in evidence.run.captures
            for seen in capture.passed.attention
            if (seen.step, seen.name) == (step, right.name)
            and (pair := _compared(capture.rank, seen, right, fits)) is not None
        ]
        findings = {pair.rank: finding for pair in pairs for finding in islice(_findings(pair), 1)}
        if findings:
            ranks = tuple(sorted(findings))
            finding = replace(findings[ranks[0]], tensor=right.name, ranks=ranks)
            axis = finding.axis and _axis_of_parts(evidence, pairs)
            finding = replace(finding, axis=axis)
            held = {pair.rank for pair in pairs}
            return with_distinguishing_axis(evidence.axes(), finding, ranks, held)
    return None


_OF_PARTS = "parts"
"""Stands for the axes along which sequences are split."""


def _axis_of_parts(evidence: CapturedEvidence, pairs: list[ComparedAttention]) -> str:
    """Return the axes along which ranks have queries of other tokens."""
    cuts = {pair.rank: [part for part in pair.cut if part[0] == _TOKENS] for pair in pairs}
    return " and ".join(
        axis
        for axis in evidence.mesh.axes
        if any(
            cuts.get(other, cut) != cut
            for rank, cut in cuts.items()
            for other in evidence.mesh.group(rank, (axis,))
        )
    )


def _compared(
    rank: int, seen: AttentionArguments, right: AttentionArguments, fits: float
) -> ComparedAttention | None:
    for rotated in (False, True):
        cut = _place(seen.q_BHTd, right.q_BHTd, fits, lengths=rotated)
        if cut is not None:
            return ComparedAttention(
                rank=rank, seen=seen, right=right, cut=cut, fits=fits, rotated=rotated
            )
    return None


def _place(
    seen: torch.Tensor, right: torch.Tensor, fits: float, *, lengths: bool = False
) -> Cut | None:
    """Return the slice of one device's tensor that a rank has, or has the lengths of."""
    seen, right = seen.double(), right.double()
    if seen.shape[-1] != right.shape[-1]:
        return None
    if lengths:
        seen, right = seen.norm(dim=-1, keepdim=True), right.norm(dim=-1, keepdim=True)
    for cut in cuts_of(seen.shape, right.shape):
        if relative_residual(seen, sliced(right, cut)) <= fits:
            return cut
    return None


def _findings(pair: ComparedAttention) -> Iterator[ProofFinding]:
    if pair.rotated:
        yield from _other_positions(pair)
        return
    yield from _other_scale(pair)
    yield from _other_heads(pair)
    yield from _fewer_keys(pair)
    yield from _other_mask(pair)


def _other_scale(pair: ComparedAttention) -> Iterator[ProofFinding]:
    seen, right = pair.seen.scale, pair.right.scale
    if abs(seen - right) > pair.fits * abs(right):
        says = f"scores of {pair.right.name} are multiplied by {seen:.6g} instead of {right:.6g}"
        yield ProofFinding("multiplier", says, value=seen / right)


def _other_heads(pair: ComparedAttention) -> Iterator[ProofFinding]:
    """Find query heads that meet another key head than on one device."""
    heads, whole = pair.seen.q_BHTd.shape[_HEADS], pair.right.q_BHTd.shape[_HEADS]
    of, whole_of = pair.seen.k_BHSd.shape[_HEADS], pair.right.k_BHSd.shape[_HEADS]
    if heads % of or whole % whole_of:
        return
    for head in range(heads):
        query = _head_of(pair.seen.q_BHTd, pair.right.q_BHTd, head, pair.fits)
        key_head = pair.seen.k_BHSd[:, (key := head // (heads // of)) : key + 1]
        local = _head_of(key_head, pair.right.k_BHSd, 0, pair.fits)
        if query is None or local is None:
            continue
        wanted = query // (whole // whole_of)
        if _place(key_head, pair.right.k_BHSd[:, wanted : wanted + 1], pair.fits) is None:
            says = f"in {pair.right.name} head {query} of the queries meets head {local} of the "
            says += f"keys, and head {wanted} on one device: heads are cut or repeated wrongly"
            yield ProofFinding("attention cut", says)
            return


def _head_of(seen: torch.Tensor, right: torch.Tensor, head: int, fits: float) -> int | None:
    """Return which head of one device a head of a rank is; the first of those that are alike."""
    cut = _place(seen[:, head : head + 1], right, fits)
    if cut is None:
        return None
    return next((part.start for dim, part in cut if dim == _HEADS), 0)


def _fewer_keys(pair: ComparedAttention) -> Iterator[ProofFinding]:
    """Find queries that meet the keys of one part of the sequence alone."""
    count, whole = pair.seen.k_BHSd.shape[_TOKENS], pair.right.k_BHSd.shape[_TOKENS]
    if count < whole and _place(pair.seen.k_BHSd, pair.right.k_BHSd, pair.fits) is not None:
        says = (
            f"queries of {pair.right.name} meet {count} of {whole} keys, those of one part of the "
        )
        says += "sequence: keys of the other parts are not gathered"
        yield ProofFinding("attention cut", says, _OF_PARTS)


def _other_mask(pair: ComparedAttention) -> Iterator[ProofFinding]:
    """Find keys that queries may meet here and not on one device, or the other way round."""
    masks = pair.allowed()
    if masks is None:
        return
    seen_BTS, right_BTS = (mask[:, 0] for mask in masks)
    extra, lost = seen_BTS & ~right_BTS, right_BTS & ~seen_BTS
    where = f"in {pair.right.name} "
    if bool(extra.any()):
        sequence, query, key = (int(number) for number in extra.nonzero()[0])
        met = f"token {query} of sequence {sequence} meets token {key}"
        times = f"{int(extra.sum())} pairs of tokens meet that do not on one device ({met})"
        start = _first_token(pair)
        later = extra & (
            torch.arange(extra.shape[2]) > start + torch.arange(extra.shape[1])[:, None]
        )
        if bool((later == extra).all()) and not bool(right_BTS.all()):
            yield ProofFinding("causal mask", f"{where}{times}: tokens meet later ones")
        unmet = ~right_BTS.any(1, keepdim=True)
        if bool((extra <= unmet.expand_as(extra)).all()):
            says = f"{where}{times}: no token meets them there, for they are padding"
            yield ProofFinding("padding in the softmax", says)
        says = f"{where}{times}: documents see one another"
        yield ProofFinding("documents see one another", says)
    elif bool(lost.any()):
        sequence, query, key = (int(number) for number in lost.nonzero()[0])
        says = f"{where}{int(lost.sum())} pairs of tokens do not meet that do on one device (token "
        says += f"{query} of sequence {sequence} and token {key})"
        yield ProofFinding("attention cut", says)


def _first_token(pair: ComparedAttention) -> int:
    """Return the token of the whole sequence that the first query of a rank is."""
    return next((part.start for dim, part in pair.cut if dim == _TOKENS), 0)


def _other_positions(pair: ComparedAttention) -> Iterator[ProofFinding]:
    """Find by how many positions queries are rotated further than on one device."""
    seen, right = pair.seen.q_BHTd.double(), sliced(pair.right.q_BHTd.double(), pair.cut)
    offsets_BT = _offsets(seen, right)
    if offsets_BT is None:
        return
    off = offsets_BT.nonzero()
    if not len(off):
        return
    sequence, token = (int(number) for number in off[0])
    number = int(offsets_BT[sequence, token])
    whose = f"queries of {pair.right.name} are rotated otherwise: {len(off)} of "
    whose += f"{offsets_BT.numel()} tokens, the first (token {token} of sequence {sequence}) as if "
    whose += f"{abs(number)} positions {'later' if number > 0 else 'earlier'}"
    size = seen.shape[_TOKENS]
    if number == -_first_token(pair) and bool((offsets_BT == number).all()):
        says = f"{whose}: each part of a sequence counts from 0"
        yield ProofFinding("positions of a part", says, _OF_PARTS, value=float(number))
    elif number == token and size == pair.right.q_BHTd.shape[_TOKENS]:
        says = f"{whose}: positions are not reset where a document starts"
        yield ProofFinding("positions not reset", says, value=float(number))
    else:
        yield ProofFinding("positions", whose, value=float(number))


def _offsets(seen: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Return how many positions further each token [B, T] is; None where it is no rotation.

    The first pair of each head turns by 1 radian for a position.
    """
    half = seen.shape[-1] // 2
    for pairs in (slice(None, half), slice(half, None)), (slice(0, None, 2), slice(1, None, 2)):
        z, z_right = (torch.complex(x[..., pairs[0]], x[..., pairs[1]]) for x in (seen, right))
        if z.shape[-1] and relative_residual(z.abs(), z_right.abs()) < _SAME_LENGTH:
            angles_BT = (z[..., 0] / z_right[..., 0])[:, 0].angle()
            size = 2 * right.shape[_TOKENS] + _FURTHER
            steps = torch.arange(-size, size + 1)
            steps = steps[steps.abs().argsort(stable=True)]
            off = (
                (angles_BT[..., None] - steps).sin().abs()
                + 1
                - (angles_BT[..., None] - steps).cos()
            )
            nearest = (off < _SAME_ANGLE).int().argmax(-1)
            found = off.gather(-1, nearest[..., None])[..., 0] < _SAME_ANGLE
            return steps[nearest] if bool(found.all()) else None
    return None


_SAME_LENGTH = 1e-6  # relative
_SAME_ANGLE = 1e-4  # radians
_FURTHER = 64  # positions beyond twice the tokens of a sequence that are tried
