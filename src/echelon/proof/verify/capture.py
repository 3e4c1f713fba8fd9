# SPDX-License-Identifier: Apache-2.0
"""What a rank captures from outside while its program runs: by hooks that are all taken off again.

Before the first step the parameters; in each step the gradients of each backward on this rank and
those that the optimizer takes, then parameters and optimizer state; what a step returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_RETURNED
from echelon.launch.context import RankContext
from echelon.proof.ranks import INITIAL
from echelon.proof.verify.case import OnRank
from echelon.proof.verify.passing.watch import Passed, PassingWatch
from echelon.proof.verify.placement.located import LocatedTensor, LogicalParameters
from echelon.proof.verify.placement.names import NameTable
from echelon.proof.verify.placement.program import open_program
from echelon.proof.verify.placement.registry import open_store
from echelon.proof.verify.placement.torch_store import (
    GRADIENTS,
    PARAMETERS,
    Fragment,
    HeldParameter,
)
from echelon.proof.verify.reference import Tensors
from echelon.proof.verify.sharding import AskedSharding, asked_sharding
from echelon.proof.verify.subject_file import SubjectFile, SubjectSettings, open_subject

LOCAL = "local"
"""The kind of gradients before reduction; each backward of a step has a number."""

STAND_INS = "stand-ins"
"""The kind of gradients of what a model has in the place of parameters when it updates them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPiece:
    """Hold elements of one parameter of one device that a rank held at one time.

    `kind` is "parameters", "gradients", "local" (before reduction), or a key of optimizer state;
    `call` counts the backward passes of a step. `index` says which elements, `source` the rank's
    own name.
    """

    kind: str
    step: int
    name: str
    source: str
    index: torch.Tensor
    values: torch.Tensor
    call: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Hold what a step returned: the loss, the norm and the tokens behind it, as far as told."""

    loss: float | None = None
    grad_norm: float | None = None
    tokens: float | None = None


@dataclass(slots=True, kw_only=True)
class RankCapture:
    """Hold all that was captured on one rank in one precision."""

    rank: int
    framework: str = ""
    reads_clipped: bool = True
    copied_initial: bool = False
    asked: AskedSharding | None = None
    passed: Passed = field(default_factory=Passed)
    reports: list[RankReport] = field(default_factory=list[RankReport])
    pieces: list[CapturedPiece] = field(default_factory=list[CapturedPiece])

    def add(self, kind: str, step: int, fragments: Iterable[Fragment], call: int = 0) -> None:
        """Keep copies of fragments, by the parameters that they are of."""
        for fragment in fragments:
            values = fragment.values.detach().reshape(-1).cpu().clone()
            for name, index, part in fragment.place.pieces(values, fragment.start):
                self.pieces.append(
                    CapturedPiece(
                        kind=kind,
                        step=step,
                        name=name,
                        source=fragment.name,
                        index=index,
                        values=part,
                        call=call,
                    )
                )


def capture_rank(context: RankContext, argument: Mapping[str, Any]) -> RankCapture:
    """Run a rank's program and capture it: the target that the ranks run.

    `argument` holds `file`, `settings`, `dtype`, and of one device the `logical` parameters, the
    `initial` weights and the names of its `modules`.
    """
    settings: SubjectSettings = argument["settings"]
    logical: LogicalParameters = argument["logical"]
    file = open_subject(argument)
    program = file.on_rank(settings.case(context.rank, argument["dtype"], context.device))
    table = NameTable(logical=logical, mesh=settings.mesh, rank=context.rank, names=program.names)
    capture = RankCapture(rank=context.rank, copied_initial=program.copy_initial)
    opened = open_program(program, table)
    watched = _Watched(open_store(opened), capture)
    passing = PassingWatch(opened.logical_modules(argument["modules"]), watched.forward_step)
    capture.passed = passing.passed
    if program.copy_initial:
        watched.store.write(partial(_initial_values, argument["initial"]))
    capture.add(PARAMETERS, INITIAL, watched.store.parameters())
    capture.asked = asked_sharding(opened)
    with watched.hooks(), passing.hooks():
        if program.run is not None:
            with file.calling(f"run, rank {context.rank}"):
                returned = program.run()
            watched.end_run()
            capture.reports = _reports(returned, watched.step + 1)
        else:
            for number in range(settings.num_steps):
                context.progress.mark(f"step {number}")
                capture.reports.append(watched.run_step(file, program, number))
    if program.close is not None:
        with file.calling(f"close, rank {context.rank}"):
            program.close()
    return capture


class _Watched:
    """Watch a program: which step it is in, and how often each parameter got a gradient in it."""

    def __init__(self, store: Any, capture: RankCapture) -> None:
        self.store = store
        self.capture = capture
        capture.framework = store.framework
        capture.reads_clipped = store.reads_clipped
        self.step = INITIAL
        self._own_loop = True
        self._updating: set[int] = set()
        self._calls: dict[str, int] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles = [
            held.parameter.register_hook(self._local_hook(held)) for held in self.store.leaves()
        ]
        handles += self.store.on_update(self._before_update)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run_step(self, file: SubjectFile, program: OnRank, number: int) -> RankReport:
        """Run one step of the program and keep what is there after it."""
        assert program.step is not None, "a program has step or run"
        self._own_loop = False
        self._begin(number)
        rank = self.capture.rank
        with file.calling(f"step {number}, rank {rank}"):
            returned = program.step(number)
        self._end()
        report = read_report(returned)
        if report.grad_norm is None and (norm := self.store.grad_norm()) is not None:
            report = RankReport(loss=report.loss, grad_norm=norm, tokens=report.tokens)
        return report

    def end_run(self) -> None:
        """Keep what is there after the last step of a program's own loop."""
        if self.step != INITIAL:
            self._end()

    def forward_step(self) -> int:
        """Return the step that a forward or backward pass which runs now is of."""
        # In a program's own loop the first one after an update is of the next step.
        return self.step + (self._own_loop and (bool(self._updating) or self.step == INITIAL))

    def _begin(self, number: int) -> None:
        self.step = number
        self._updating.clear()
        self._calls.clear()

    def _end(self) -> None:
        self.capture.add(PARAMETERS, self.step, self.store.parameters())
        for key, fragment in self.store.state():
            self.capture.add(key, self.step, [fragment])

    def _local_hook(self, held: HeldParameter) -> Callable[[torch.Tensor | None], None]:
        def hook(gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return  # put off: it goes to its bucket without autograd
            step = self.forward_step()
            key = f"{step} {held.name}"
            call = self._calls.get(key, 0)
            self._calls[key] = call + 1
            fragment = Fragment(name=held.name, place=held.place, values=gradient.reshape(-1))
            if gradient.numel() == held.place.numel:
                self.capture.add(LOCAL, step, [fragment], call)

        return hook

    def _before_update(self, optimizer: Any) -> None:
        if self._own_loop and (self.step == INITIAL or id(optimizer) in self._updating):
            # The next step of a loop that is the program's own.
            if self.step != INITIAL:
                self._end()
            self.step += 1
            self._updating.clear()
        if id(optimizer) in self._updating:
            return  # twice in one step: the gradients of the first time are compared
        self._updating.add(id(optimizer))
        self.capture.add(GRADIENTS, self.step, self.store.gradients(optimizer))
        self.capture.add(STAND_INS, self.step, self.store.stand_ins())


def _initial_values(initial: Tensors, place: LocatedTensor) -> torch.Tensor:
    """Return the first weights of one device in the order of a rank's tensor; 0 for padding."""
    values = torch.zeros(place.numel, dtype=next(iter(initial.values())).dtype)
    for number, name in enumerate(place.names):
        mine = (place.owner == number) & (place.index >= 0)
        values[mine] = initial[name].reshape(-1)[place.index[mine]]
    return values


def _reports(returned: Any, num_steps: int) -> list[RankReport]:
    given = list(returned) if isinstance(returned, (list, tuple)) else []
    reports = [read_report(one) for one in given[:num_steps]]
    return reports + [RankReport()] * (num_steps - len(reports))


def read_report(returned: Any) -> RankReport:
    """Return what a step returned; ConfigError where it is no number and no mapping."""
    if isinstance(returned, Mapping):
        unknown = [key for key in returned if key not in ("loss", "grad_norm", "tokens")]
        if not unknown:
            return RankReport(**{key: _number(key, value) for key, value in returned.items()})
        problem = f"a step returned {unknown[0]!r}; it may hold loss, grad_norm and tokens"
        raise ConfigError(VERIFY_RETURNED.problem(problem))
    return RankReport(loss=_number("loss", returned))


def _number(key: str, value: Any) -> float | None:
    if value is None:
        return None
    if torch.is_tensor(value):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        value = value.detach()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"a step returned {type(value).__name__} as its {key}: it must be a number"
        raise ConfigError(VERIFY_RETURNED.problem(problem)) from error
