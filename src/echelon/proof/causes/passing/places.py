# SPDX-License-Identifier: Apache-2.0
"""Where what passed on a rank lies in what passed on one device, found by comparing.

A tensor of a rank is all of it, or a slice along some of its dims, which one the values say. A
gradient is compared but for a factor: each rank's is of the mean over its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import fit_factor, relative_residual
from echelon.proof.evidence.run import ITS_INPUT, PassedTensor

Cut = tuple[tuple[int, range], ...]
"""Each dim that is cut, and the elements along it: rows may be every n-th one."""

_MOST_PLACES = 256  # slices that are tried
_OTHER_ROUNDING = 1e4  # unit roundoffs that two right passes through a model differ by
_ALIKE = 0.85  # part of a tensor that is not along the right one; of unlike ones 1
_TOO_ROUGH = 0.1  # relative difference from which on right and wrong are not told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedPlace:
    """Hold a tensor of a rank beside the slice that it must be; `factor` is what it is times it."""

    rank: int
    call: int
    values: torch.Tensor
    right: torch.Tensor
    cut: Cut
    factor: float
    residual: float


@dataclass(slots=True, kw_only=True)
class ComparedModule:
    """Hold how the output of a module fares on the ranks, or the gradient with respect to it.

    `partial` names the axes over which wrong ones add up to right ones.
    """

    name: str
    right: list[PassedPlace] = field(default_factory=list[PassedPlace])
    wrong: list[PassedPlace] = field(default_factory=list[PassedPlace])
    partial: tuple[str, ...] = ()


class PassedStep:
    """Compare what passed in one step, forward or backward, module by module of one device."""

    def __init__(self, evidence: CapturedEvidence, step: int) -> None:
        """Take the outputs first: they say where gradients lie."""
        self.evidence = evidence
        self.step = step
        self.fits = max(1e-6, _OTHER_ROUNDING * torch.finfo(evidence.dtype).eps / 2)
        self.sources: dict[str, list[str]] = {}
        self._whole: dict[tuple[str, bool], torch.Tensor] = {}
        self._order: dict[bool, list[str]] = {False: [], True: []}
        told = evidence.passed.tensors if self.fits < _TOO_ROUGH else []
        mine = [one for one in told if one.step == step]
        several = {one.name for one in mine if one.call}
        for one in mine:
            if one.name not in several:
                self._whole[one.name, one.gradient] = one.values.double()
                self._order[one.gradient].append(one.name)
                if one.source and not one.gradient:
                    self.sources.setdefault(one.source, []).append(one.name)
        self._held: dict[tuple[str, bool], list[tuple[int, PassedTensor]]] = {}
        for capture in evidence.run.captures:
            for one in capture.passed.tensors:
                if one.step == step and (one.name, one.gradient) in self._whole:
                    self._held.setdefault((one.name, one.gradient), []).append((capture.rank, one))
        self.forward = self._compare_forward()
        self.backward = self._compare_backward()

    def whole(self, name: str, *, gradient: bool = False) -> torch.Tensor | None:
        """Return what one device has of a module, float64."""
        return self._whole.get((name, gradient))

    def before(self, name: str) -> Iterator[str]:
        """Yield what passed forward before the output of a module, all of it being right."""
        for other, module in self.forward.items():
            if other == name:
                return
            if module.right and not module.wrong:
                yield other

    def covers_batch(self) -> bool:
        """Return whether right outputs of some module are, on all ranks together, the whole one."""
        for name, module in self.forward.items():
            seen = torch.zeros(self._whole[name, False].shape, dtype=torch.bool)
            for one in module.right:
                sliced(seen, one.cut).fill_(True)
            if bool(seen.all()):
                return True
        return False

    def _compare_forward(self) -> dict[str, ComparedModule]:
        """Return each module that can be compared: behind a right one of the same pass.

        The first of a pass can be, too, where its place is sure though it is wrong.
        """
        found: dict[str, ComparedModule] = {}
        seen: set[tuple[int, int]] = set()
        began: set[tuple[int, int]] = set()
        for name in self._order[False]:
            module = ComparedModule(name=name)
            for rank, one in self._held.get((name, False), []):
                place = self._place(rank, one, self._whole[name, False])
                if place is None:
                    continue
                right = place.residual <= self.fits and abs(place.factor - 1) <= self.fits
                if right:
                    module.right.append(place)
                    seen.add((rank, one.call))
                elif (rank, one.call) in seen or (
                    (rank, one.call) not in began and _is_near(place)
                ):
                    module.wrong.append(place)
                    seen.add((rank, one.call))
                began.add((rank, one.call))
            found[name] = self._with_partial(module)
        return found

    def _compare_backward(self) -> dict[str, ComparedModule]:
        """Return each module whose output lies at a known place; factors must stay the same."""
        found: dict[str, ComparedModule] = {}
        factors: dict[tuple[int, int], float] = {}
        for name in self._order[True]:
            module = ComparedModule(name=name)
            output = self.forward.get(name, module)
            # The gradient of each part of a sum is that of the sum.
            placed = [*output.right, *(output.wrong if output.partial else ())]
            outputs = {(one.rank, one.call): one.cut for one in placed}
            for rank, one in self._held.get((name, True), []):
                here = rank, one.call
                if here not in outputs:
                    continue
                place = self._place(rank, one, self._whole[name, True], outputs[here])
                if place is None or not float(place.right.norm()):
                    continue
                usual = factors.get(here, place.factor)
                near = abs(place.factor - usual) <= self.fits * abs(usual)
                if place.residual <= self.fits and near and place.factor:
                    module.right.append(place)
                    factors[here] = place.factor
                else:
                    module.wrong.append(place)
            found[name] = self._with_partial(module)
        return found

    def _place(
        self, rank: int, one: PassedTensor, whole: torch.Tensor, known: Cut | None = None
    ) -> PassedPlace | None:
        values = one.values.double()
        best: PassedPlace | None = None
        for cut in [known] if known is not None else cuts_of(values.shape, whole.shape):
            right = sliced(whole, cut)
            if right.shape != values.shape:
                continue
            factor, residual = fit_factor(values, right)
            if one.gradient is False:
                residual = relative_residual(values, right)
                factor = 1.0 if residual <= self.fits else factor
            if best is None or residual < best.residual:
                best = PassedPlace(
                    rank=rank,
                    call=one.call,
                    values=values,
                    right=right,
                    cut=cut,
                    factor=factor,
                    residual=residual,
                )
        return best

    def _with_partial(self, module: ComparedModule) -> ComparedModule:
        """Find the axes over which what ranks have adds up to the right thing."""
        if not module.wrong:
            return module
        held = {(one.rank, one.call): one for one in (*module.wrong, *module.right)}
        mesh = self.evidence.mesh
        for axes in mesh.axis_sets():
            sums: list[bool] = []
            for one in module.wrong:
                group = [held.get((rank, one.call)) for rank in mesh.group(one.rank, axes)]
                parts = [part.values for part in group if part is not None and part.cut == one.cut]
                if len(parts) < len(group):
                    break
                total = torch.stack(parts).sum(0)
                differ = max(relative_residual(parts[0], part) for part in parts) > self.fits
                sums.append(differ and fit_factor(total, one.right)[1] <= self.fits)
            if len(sums) == len(module.wrong) and all(sums):
                module.partial = axes
                break
        return module


def _is_near(place: PassedPlace) -> bool:
    """Return whether a wrong tensor is nearly a slice, or all of the right one and more."""
    left = fit_factor(place.values, place.right)[1]
    return place.residual < _TOO_ROUGH or (not place.cut and place.factor > 0 and left < _ALIKE)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongModule:
    """Hold the first wrong module of a pass, and the last right one before it."""

    passed: PassedStep
    module: ComparedModule
    backward: bool
    before: ComparedModule | None

    @property
    def name(self) -> str:
        """Return the name that the module has on one device."""
        return self.module.name

    @property
    def evidence(self) -> CapturedEvidence:
        """Return what the step is of."""
        return self.passed.evidence

    @property
    def where(self) -> str:
        """Return which pass, and what of the module."""
        if self.backward:
            return f"backward: the gradient with respect to the output of {self.name}"
        module = self.name.removesuffix(ITS_INPUT)
        return f"forward: {'the output of' if module == self.name else 'what enters'} {module}"

    @property
    def usual(self) -> float:
        """Return what right gradients of the first wrong rank are times those of one device."""
        one = self.module.wrong[0]
        modules = self.passed.backward.values() if self.backward else ()
        return next(
            (
                place.factor
                for module in modules
                for place in module.right
                if (place.rank, place.call) == (one.rank, one.call)
            ),
            1.0,
        )


def first_wrong_module(passed: PassedStep, *, backward: bool) -> WrongModule | None:
    """Return the first wrong module in the order of one device."""
    modules = list((passed.backward if backward else passed.forward).values())
    before: ComparedModule | None = None
    for number, module in enumerate(modules):
        if module.wrong and not _is_mended(module, modules[number + 1 :]):
            return WrongModule(passed=passed, module=module, backward=backward, before=before)
        if module.right:
            before = module
    return None


def _is_mended(module: ComparedModule, later: list[ComparedModule]) -> bool:
    """Return whether a wrong module is a matter of place: what comes after it is right.

    Modules of the same parent do not tell: they may not have come from it.
    """
    parent = module.name.rpartition(".")[0]
    passes = {(one.rank, one.call) for one in module.wrong}
    for other in later:
        # A sum that is due may be made anywhere: the next module tells.
        if parent and other.name.startswith(f"{parent}.") and not module.partial:
            continue
        compared = [one for one in (*other.right, *other.wrong) if (one.rank, one.call) in passes]
        if compared:
            return not any((one.rank, one.call) in passes for one in other.wrong)
    return False


def sliced(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return the slice of a tensor that a cut says, as a view."""
    for dim, part in cut:
        whole = whole[(slice(None),) * dim + (slice(part.start, part.stop, part.step),)]
    return whole


def cut_axes(evidence: CapturedEvidence, places: Sequence[PassedPlace], *, inner: bool) -> str:
    """Return the axes along which places are cut otherwise; `inner`: along another dim than rows.

    Rows are the first dim: what is cut there alone is another replica's.
    """
    cuts: Mapping[tuple[int, int], Cut] = {(one.rank, one.call): one.cut for one in places}
    found: list[str] = []
    for axis in evidence.mesh.axes:
        for (rank, call), cut in cuts.items():
            others = [
                cuts[other, call]
                for other in evidence.mesh.group(rank, (axis,))
                if (other, call) in cuts
            ]
            dims = {dim for other in others for dim, _ in set(other) ^ set(cut)}
            if dims - ({0} if inner else set[int]()):
                found.append(axis)
                break
    return " and ".join(found)


def cuts_of(shape: Sequence[int], whole: Sequence[int]) -> Iterator[Cut]:
    """Yield the equal slices of a tensor that have a shape; of rows every n-th one, too."""
    if (
        len(shape) != len(whole)
        or 0 in shape
        or any(w % s for s, w in zip(shape, whole, strict=True))
    ):
        return
    counts = [w // s for s, w in zip(shape, whole, strict=True)]
    if torch.Size(counts).numel() > _MOST_PLACES:
        return
    parts = [
        [range(place * size, (place + 1) * size) for place in range(count)]
        for size, count in zip(shape, counts, strict=True)
    ]
    for step in range(2, counts[0] + 1 if shape[0] > 1 else 0):
        if counts[0] % step == 0:
            size = shape[0] * step
            starts = range(0, whole[0], size)
            parts[0] += [
                range(a + b, a + b + size - step + 1, step) for a in starts for b in range(step)
            ]
    for places in product(*parts):
        yield tuple((dim, part) for dim, part in enumerate(places) if counts[dim] > 1)
