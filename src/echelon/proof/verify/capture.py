# SPDX-License-Identifier: Apache-2.0
"""What a rank captures from outside while its program runs: by hooks that are all taken off again.

Before the first step the parameters; in each step the gradients of each backward on this rank and
those that the optimizer takes, then parameters and optimizer state; what a step returns.

A replica of everything trains as well as shards of it, and takes as many times the memory: what the
program was asked to shard is read, too. Of Accelerate from its environment (it keeps no more where
it falls back to another kind), of DeepSpeed from its engine, which says what it keeps of a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_RETURNED
from echelon.launch.context import RankContext
from echelon.launch.environment import zero_stage_asked_of_accelerate
from echelon.parallel.completion.late_program import LateProgram
from echelon.proof.evidence.captured import (
    LOCAL,
    SHARDS_PARAMETERS,
    STAND_INS,
    AskedSharding,
    CapturedPiece,
    LateRank,
    LogicalParameters,
    RankCapture,
    RankReport,
)
from echelon.proof.evidence.run import GRADIENTS, INITIAL, PARAMETERS, Tensors
from echelon.proof.verify.case import OnRank
from echelon.proof.verify.placement.located import LocatedTensor
from echelon.proof.verify.placement.names import NameTable
from echelon.proof.verify.placement.program import Program, open_program
from echelon.proof.verify.placement.registry import open_store
from echelon.proof.verify.placement.torch_store import Fragment, HeldParameter
from echelon.proof.verify.subject_file import SubjectFile, SubjectSettings, open_subject
from echelon.proof.verify.watch import PassingWatch


def keep(
    capture: RankCapture, kind: str, step: int, fragments: Iterable[Fragment], call: int = 0
) -> None:
    """Add copies of fragments to a capture, by the parameters that they are of."""
    for fragment in fragments:
        values = fragment.values.detach().reshape(-1).cpu().clone()
        for name, index, part in fragment.place.pieces(values, fragment.start):
            capture.pieces.append(
                CapturedPiece(
                    rank=capture.rank,
                    kind=kind,
                    step=step,
                    name=name,
                    source=fragment.name,
                    index=index,
                    tensor=part,
                    call=call,
                )
            )


def capture_rank(context: RankContext, argument: Mapping[str, Any]) -> RankCapture:
    """Run a rank's program and capture it: the target that the ranks run.

    `argument` holds `file`, `settings`, `dtype`, and of one device the `logical` parameters, the
    `initial` weights and the names of its `modules`; `late` if operations are to complete late.
    """
    if not argument.get("late"):
        return _capture(context, argument, None)
    late = LateProgram(context.rank, argument["settings"].seed)
    with late.patched():
        capture = _capture(context, argument, late)
    capture.late = LateRank(tuple(late.races), late.num_operations)
    return capture


def _capture(
    context: RankContext, argument: Mapping[str, Any], late: LateProgram | None
) -> RankCapture:
    settings: SubjectSettings = argument["settings"]
    logical: LogicalParameters = argument["logical"]
    file = open_subject(argument)
    program = file.on_rank(settings.case(context.rank, argument["dtype"], context.device))
    table = NameTable(logical=logical, mesh=settings.mesh, rank=context.rank, names=program.names)
    capture = RankCapture(rank=context.rank, copied_initial=program.copy_initial)
    opened = open_program(program, table)
    watched = _Watched(open_store(opened), capture, late)
    if late is not None:
        late.name_of = partial(_name_of, opened)
    passing = PassingWatch(opened.logical_modules(argument["modules"]), watched.forward_step)
    capture.passed = passing.passed
    if program.copy_initial:
        watched.store.write(partial(_initial_values, argument["initial"]))
    keep(capture, PARAMETERS, INITIAL, watched.store.parameters())
    capture.asked = asked_sharding(opened)
    with watched.hooks(), passing.hooks():
        if program.run is not None:
            with file.calling(f"run, rank {context.rank}"), watched.late_steps():
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

    def __init__(self, store: Any, capture: RankCapture, late: LateProgram | None = None) -> None:
        self.store = store
        self.capture = capture
        capture.framework = store.framework
        capture.reads_clipped = store.reads_clipped
        self.step = INITIAL
        self._own_loop = True
        self._updating: set[int] = set()
        self._calls: dict[str, int] = {}
        self._late = late

    def late_steps(self) -> AbstractContextManager[None]:
        """Watch operations that complete late, if any."""
        return nullcontext() if self._late is None else self._late.watching()

    def _looking(self, *, results: bool = False) -> AbstractContextManager[None]:
        """Let the capture read what an operation still fills."""
        return nullcontext() if self._late is None else self._late.quiet(results=results)

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
        with file.calling(f"step {number}, rank {rank}"), self.late_steps():
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
        with self._looking(results=True):
            keep(self.capture, PARAMETERS, self.step, self.store.parameters())
            for key, fragment in self.store.state():
                keep(self.capture, key, self.step, [fragment])

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
                keep(self.capture, LOCAL, step, [fragment], call)

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
        with self._looking():
            keep(self.capture, GRADIENTS, self.step, self.store.gradients(optimizer))
            keep(self.capture, STAND_INS, self.step, self.store.stand_ins())


def _name_of(program: Program, tensor: torch.Tensor) -> str:
    """Return the parameter whose gradient or value a buffer is, or its shape."""
    storage = tensor.untyped_storage().data_ptr()
    for parameter in program.parameters():
        held = {"": parameter.parameter, "gradient of ": parameter.parameter.grad}
        for kind, value in held.items():
            plain = type(value) in (torch.Tensor, torch.nn.Parameter)
            if plain and value.untyped_storage().data_ptr() == storage:
                return f"{kind}{parameter.name}"
    return str(list(tensor.shape))


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


def asked_sharding(program: Program) -> AskedSharding | None:
    """Return what the configuration of a rank's program asks for; None where it says nothing."""
    stage = getattr(program.engine, "zero_optimization_stage", None)
    if stage is not None and stage() >= SHARDS_PARAMETERS:
        held = dict(_kept_by_deepspeed(program))
        return AskedSharding(stage=stage(), by=f"the engine's ZeRO stage {stage()}", held=held)
    if stage is not None or "accelerate" not in sys.modules:
        return None
    asked, by = zero_stage_asked_of_accelerate()
    wrapped = any(
        isinstance(inner, FSDPModule | FullyShardedDataParallel)
        for module in program.modules
        for inner in module.modules()
    )
    return AskedSharding(stage=asked, by=by, wrapped=wrapped) if asked else None


def _kept_by_deepspeed(program: Program) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield what each rank keeps of a parameter between uses, its padding left out."""
    for one in program.parameters():
        parameter: Any = one.parameter
        kept = getattr(parameter, "ds_tensor", None)
        if kept is not None:
            target = program.locate(one, parameter.ds_shape)
            numbers = parameter.element_size(), int(parameter.ds_numel)
            size = min(int(kept.numel()), numbers[1]) * numbers[0]
            for name in target.names:
                yield name, (size, numbers[0] * numbers[1])
