# SPDX-License-Identifier: Apache-2.0
"""What a wrong forward pass of a program looks like, at its first wrong module.

A multiplier of the output, or of a term of a sum; another mask of a dropout; other rows of a
table, such as positions that are not reset where a document starts. A degree of the mesh is no
cause of a factor where ranks along it have other rows: nothing is summed over them.

Shape suffixes: n tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from echelon.proof.causes.factors import Factor, common_factor, name_factor
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.passing.places import PassedPlace, WrongModule, cut_axes, sliced
from echelon.proof.evidence.fits import fit_basis, fit_factor, relative_residual
from echelon.proof.evidence.mesh import NamedMesh

_MOST_SOURCES = 24  # outputs of modules that a wrong one is taken to be a sum of, two by two


def wrong_forward(wrong: WrongModule) -> Iterator[ProofFinding]:
    """Find a multiplier, a dropout mask or rows of a table behind a wrong output."""
    fits = [(one.factor, _beside(one)) for one in wrong.module.wrong]
    if common := common_factor(fits, wrong.passed.fits):
        yield _multiplier(wrong, *common)
    yield from _bias_again(wrong)
    yield from _rounded(wrong)
    yield from _mixture(wrong)
    yield from _other_zeros(wrong)
    yield from _other_rows(wrong)


def _beside(place: PassedPlace) -> float:
    """Return what a factor leaves of an output, relative."""
    return relative_residual(place.values, place.factor * place.right)


def _multiplier(wrong: WrongModule, factor: float, residual: float) -> ProofFinding:
    """Name a factor of an output: a degree of ranks that have copies of it, or a multiplier."""
    mesh = wrong.evidence.mesh
    copies = _axes_of_copies(mesh, wrong.module.wrong)
    known = [
        Factor(name, value, " and ".join(axes))
        for axes in mesh.axis_sets()
        if set(axes) <= copies
        for name, value in ((" x ".join(axes), float(mesh.degree(axes))),)
    ]
    known += [Factor(f"1/{one.name}", 1 / one.value, one.axis) for one in known]
    named = name_factor(factor, known, residual)
    says = f"{wrong.where} is the right one, times {factor:.6g}"
    if named.factor == "number":
        return ProofFinding("multiplier", says, value=factor, residual=residual)
    return replace(named, description=says)


def _axes_of_copies(mesh: NamedMesh, places: Sequence[PassedPlace]) -> set[str]:
    """Return the axes along which ranks have the same part of a tensor."""
    cuts = {(one.rank, one.call): one.cut for one in places}
    return {
        axis
        for axis in mesh.axes
        if all(
            cuts.get((other, call), cut) == cut
            for (rank, call), cut in cuts.items()
            for other in mesh.group(rank, (axis,))
        )
    }


def _mixture(wrong: WrongModule) -> Iterator[ProofFinding]:
    """Find two right outputs whose sum one device has, and ranks have with another weight."""
    passed, places = wrong.passed, wrong.module.wrong
    whole = passed.whole(wrong.name)
    if whole is None:
        return
    before = {
        name: value.expand_as(whole)
        for name in passed.before(wrong.name)
        if (value := passed.whole(name)) is not None
        and value.shape == whole.shape[whole.dim() - value.dim() :]
    }
    names = list(before)[-_MOST_SOURCES:]
    for late in range(len(names) - 1, 0, -1):
        for early in range(late - 1, -1, -1):
            pair = before[names[early]], before[names[late]]
            due, residual = fit_basis(whole, pair)
            if residual > passed.fits or not all(due):
                continue
            seen = [fit_basis(one.values, [sliced(x, one.cut) for x in pair]) for one in places]
            if max(residual for _, residual in seen) > passed.fits:
                continue
            weights = seen[0][0]
            ratios = [w / d for w, d in zip(weights, due, strict=True)]
            odd = max(range(2), key=lambda index: abs(ratios[index] - 1))
            says = f"{wrong.where} is the sum of {names[early]} and {names[late]} with weights "
            says += f"{weights[0]:.4g} and {weights[1]:.4g}; one device has {due[0]:.4g} and "
            yield ProofFinding("multiplier", f"{says}{due[1]:.4g}", value=ratios[odd])
            return


def _bias_again(wrong: WrongModule) -> Iterator[ProofFinding]:
    """Find the bias of a layer in its output more than once, or not at all."""
    bias = wrong.evidence.steps[wrong.passed.step].before.get(f"{wrong.name}.bias")
    if bias is None or not float(bias.norm()):
        return
    places = wrong.module.wrong
    if any(bias.shape[0] != place.right.shape[-1] or _cuts_width(place) for place in places):
        return
    fits = [
        fit_factor(place.values - place.right, bias.double().expand_as(place.right))
        for place in places
    ]
    if common := common_factor(fits, wrong.passed.fits):
        times = 1 + common[0]
        mesh = wrong.evidence.mesh
        axis = next(
            (" and ".join(a) for a in mesh.axis_sets() if _is_near(times, mesh.degree(a))), ""
        )
        says = f"{wrong.where} has the bias {times:.4g} times"
        says += f": each rank along {axis} adds it before the sum" if axis else ""
        factor = "bias missing" if _is_near(times, 0.0) else "bias added again"
        yield ProofFinding(factor, says, axis, value=times, residual=common[1])


def _cuts_width(place: PassedPlace) -> bool:
    return any(dim == place.right.dim() - 1 for dim, _ in place.cut)


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) < _NEAR


_NEAR = 1e-4  # difference of numbers that are the same but for rounding
_NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def _rounded(wrong: WrongModule) -> Iterator[ProofFinding]:
    """Find an output that equals the right output in a dtype of fewer digits."""
    places, own = wrong.module.wrong, torch.finfo(wrong.evidence.dtype).eps
    for dtype in _NARROW:
        info = torch.finfo(dtype)
        if info.eps > own and all(
            bool(((x.values - x.right).abs() <= x.right.abs() * info.eps / 2 + info.tiny).all())
            for x in places
        ):
            name = str(dtype).removeprefix("torch.")
            says = f"{wrong.where} is the right one but for rounding to {name}, element by element"
            yield ProofFinding("rounded", says)
            return


def _other_zeros(wrong: WrongModule) -> Iterator[ProofFinding]:
    """Find an output, or its difference from an earlier output, with other zeros: dropout."""
    passed = wrong.passed
    streams = [
        value
        for name in reversed([*passed.before(wrong.name)][-_MOST_SOURCES:])
        if (value := passed.whole(name)) is not None
        and value.shape == torch.Size(passed.whole(wrong.name).shape)  # type: ignore[union-attr]
    ]
    for stream in (None, *streams):
        if not all(_has_other_zeros(place, stream, passed.fits) for place in wrong.module.wrong):
            continue
        every = [*wrong.module.right, *wrong.module.wrong]
        axis = cut_axes(wrong.evidence, every, inner=False)
        over = f" for each part along {axis}" if axis else ""
        says = f"{wrong.where} is right but for which elements are zero: dropout draws another mask"
        yield ProofFinding("dropout mask", f"{says}{over}; it depends on the layout", axis)
        return


def _has_other_zeros(place: PassedPlace, stream: torch.Tensor | None, fits: float) -> bool:
    """Return whether an output, less a stream that it is added to, differs in its zeros alone."""
    before = torch.zeros_like(place.right) if stream is None else sliced(stream, place.cut)
    values, right = place.values - before, place.right - before
    none = fits * float(right.abs().max())
    there, due = values.abs() > none, right.abs() > none
    both = there & due
    if not bool(both.any()) or bool((there == due).all()) or bool(due.all()):
        return False
    return relative_residual(values[both], right[both]) <= fits


def _other_rows(wrong: WrongModule) -> Iterator[ProofFinding]:
    """Find rows of a module's table other than those of one device: positions, or tokens."""
    table = wrong.evidence.steps[wrong.passed.step].before.get(f"{wrong.name}.weight")
    if table is None or table.dim() != 2:
        return
    rows: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, one in enumerate(wrong.module.wrong):
        found = [_rows_of(x, table.double(), wrong.passed.fits) for x in (one.values, one.right)]
        if found[0] is None or found[1] is None:
            return
        rows[number] = found[0], found[1]
    seen, right = rows[0]
    off = seen - right
    first = int(off.nonzero()[0, 0])
    axis = cut_axes(wrong.evidence, [*wrong.module.right, *wrong.module.wrong], inner=True)
    says = f"{wrong.where} has other rows of its table: {int(off.ne(0).sum())} of {len(off)} "
    says += f"tokens, the first of them row {int(seen[first])} instead of {int(right[first])}"
    runs = bool((seen[1:] >= seen[:-1]).all() | (off[off != 0] > 0).all())
    restart = bool((right[1:] < right[:-1]).any())
    if restart and runs and int(right[first]) == 0:
        says += ": positions run on where they start anew on one device"
        yield ProofFinding("positions not reset", says, axis)
    elif len({*off.tolist()}) == 1:
        says += f": all are off by {int(off[0])}"
        yield ProofFinding("positions of a part", says, axis, value=float(off[0]))
    else:
        yield ProofFinding("other rows", says, axis)


def _rows_of(values: torch.Tensor, table_VD: torch.Tensor, fits: float) -> torch.Tensor | None:
    """Return which row of a table each token has; None where one has none of them."""
    values_nD = values.reshape(-1, values.shape[-1])
    if values_nD.shape[-1] != table_VD.shape[-1]:
        return None
    distance, nearest = torch.cdist(values_nD, table_VD).min(1)
    limit = fits * float(table_VD.norm(dim=1).max())
    return nearest if bool((distance <= max(limit, 1e-6)).all()) else None
