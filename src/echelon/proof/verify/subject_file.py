# SPDX-License-Identifier: Apache-2.0
"""The user's file: read, checked, and its functions called with errors that say where they are."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from echelon.config.reading import DEVICE_FUNCTION, RANK_FUNCTION, require_program, split_program
from echelon.core.errors import ConfigError, EchelonError, EnvironmentProblem, Problem
from echelon.core.rulebook import verify as rules
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verify.case import OneDevice, OnRank, VerifyCase

NUM_STEPS = 3
"""Optimizer steps where the file says nothing."""

MAX_RANKS = 64
"""Ranks that are started on one machine at most."""

_MODULE = "echelon_subject"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectSettings:
    """Hold what the constants of a file say; all of it can travel between processes."""

    degrees: Mapping[str, int]
    dtype: str = "float32"
    float64: bool = True
    num_steps: int = NUM_STEPS
    seed: int = 0

    @property
    def mesh(self) -> NamedMesh:
        """Return the mesh of the file."""
        return NamedMesh(self.degrees)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Return the precisions of the passes, by dtype, float64 first."""
        exact = ("float64",) if self.float64 else ()
        return (*exact, *((self.dtype,) if self.dtype != "float64" or not exact else ()))

    def case(self, rank: int, dtype: str, device: torch.device) -> VerifyCase:
        """Return what the function of a rank is given."""
        return VerifyCase(
            rank=rank,
            world_size=self.mesh.world_size,
            mesh=self.mesh.coordinates(rank),
            degrees=dict(self.degrees),
            device=device,
            dtype=getattr(torch, dtype),
            seed=self.seed,
            num_steps=self.num_steps,
        )


def open_subject(argument: Mapping[str, Any]) -> SubjectFile:
    """Return the subject that an argument of a target names: a file, or what its `opener` makes."""
    opener = argument.get("opener")
    if opener is None:
        return SubjectFile(Path(argument["file"]))
    module, _, function = str(opener).partition(":")
    return getattr(importlib.import_module(module), function)(argument)


class SubjectFile:
    """Call the functions of a user's file."""

    def __init__(self, path: Path) -> None:
        """Import the file; ConfigError where it cannot be, or lacks a function.

        `FILE:function` takes another function than `on_rank` for the program of a rank.
        """
        self.path, self.function = split_program(path, RANK_FUNCTION)
        path = self.path
        require_program(path, ())
        self.program = self._load()
        missing = [
            f"{path.name} has no function {name}"
            for name in self.required()
            if not callable(getattr(self.program, name, None))
        ]
        if missing:
            raise ConfigError([rules.VERIFY_FILE.problem(text) for text in missing])

    def required(self) -> tuple[str, ...]:
        """Return the functions that the file must have."""
        return (DEVICE_FUNCTION, self.function)

    def _load(self) -> ModuleType:
        folder = str(self.path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        name = f"{_MODULE}_{self.path.stem}"
        spec = importlib.util.spec_from_file_location(name, self.path)
        if spec is None or spec.loader is None:
            raise ConfigError(rules.VERIFY_FILE.problem(f"{self.path} is not a Python file"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        with self.calling(f"importing {self.path.name}"):
            spec.loader.exec_module(module)
        return module

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Turn what user code raises into one error that names the place; ours pass through."""
        try:
            yield
        except EchelonError:
            raise
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            raise EnvironmentProblem(
                rules.VERIFY_PACKAGE.problem(
                    f"{what}: {self.path.name} needs {package}, which this Python has not",
                    suggestions=(f"the python of an environment with {package}",),
                )
            ) from error
        except Exception as error:
            raise ConfigError(
                rules.VERIFY_RAISED.problem(f"{what}: {_told(error, self.path)}")
            ) from error

    def settings(self, ranks: int | None) -> SubjectSettings:
        """Return what the constants of the file say; ConfigError with all that is wrong."""
        problems: list[Problem] = []
        given: Any = getattr(self.program, "MESH", None if ranks is None else {"dp": ranks})
        degrees: dict[str, int] = {"dp": 1}
        if _is_mesh(given):
            degrees = dict(given)
        else:
            problems.append(
                rules.VERIFY_MESH.problem(
                    f"MESH of {self.path.name} is {given!r}; it maps axes to degrees from 1 on",
                    suggestions=('MESH = {"dp": 2}',),
                )
            )
        dtype = str(getattr(self.program, "DTYPE", torch.float32)).removeprefix("torch.")
        known = getattr(torch, dtype, None)
        if not isinstance(known, torch.dtype) or not known.is_floating_point:
            problems.append(
                rules.VERIFY_FILE.problem(
                    f"DTYPE of {self.path.name} is {dtype}",
                    suggestions=("torch.float32", "torch.bfloat16"),
                )
            )
        num_steps = getattr(self.program, "NUM_STEPS", NUM_STEPS)
        if not isinstance(num_steps, int) or num_steps < 1:
            problems.append(
                rules.VERIFY_FILE.problem(
                    f"NUM_STEPS of {self.path.name} is {num_steps!r}", suggestions=("3",)
                )
            )
        world = NamedMesh(degrees).world_size
        if ranks is not None and ranks != world:
            problems.append(
                rules.VERIFY_MESH.problem(
                    f"MESH of {self.path.name} is {NamedMesh(degrees)}: {world} ranks, not {ranks}",
                    suggestions=(f"--ranks {world}",),
                )
            )
        if problems:
            raise ConfigError(problems)
        return SubjectSettings(
            degrees=degrees,
            dtype=dtype,
            float64=bool(getattr(self.program, "FLOAT64", True)),
            num_steps=num_steps,
            seed=int(getattr(self.program, "SEED", 0)),
        )

    def one_device(self, case: VerifyCase) -> OneDevice:
        """Return the training on one device."""
        torch.manual_seed(case.seed)
        with self.calling("one_device"):
            made: Any = self.program.one_device(case)
        _require(isinstance(made, OneDevice), "one_device", "an ec.OneDevice", made)
        _require(isinstance(made.model, nn.Module), "one_device: model", "a module", made.model)
        _require(callable(made.loss), "one_device: loss", "a function of the step", made.loss)
        optimizer = made.optimizer
        right = isinstance(optimizer, torch.optim.Optimizer)
        _require(right, "one_device: optimizer", "a torch.optim.Optimizer", optimizer)
        return made

    def on_rank(self, case: VerifyCase) -> OnRank:
        """Return the program of a rank."""
        torch.manual_seed(case.seed)
        function = self.function
        with self.calling(f"{function}, rank {case.rank}"):
            made: Any = getattr(self.program, function)(case)
        _require(isinstance(made, OnRank), function, "an ec.OnRank", made)
        model = made.model is not None or made.models or made.engine is not None
        _require(bool(model), f"{function}: model", "a module, stages, or an engine", made.model)
        one = (made.step is None) != (made.run is None)
        _require(one, function, "step or run, and not both", made.step)
        return made


def _is_mesh(degrees: object) -> bool:
    return (
        isinstance(degrees, Mapping)
        and bool(degrees)
        and all(
            isinstance(axis, str) and isinstance(degree, int) and degree >= 1
            for axis, degree in degrees.items()
        )
    )


def _require(right: bool, what: str, wanted: str, found: object) -> None:
    if not right:
        text = f"{what} must be {wanted}; it is {type(found).__name__}"
        raise ConfigError(rules.VERIFY_RETURNED.problem(text))


def _told(error: Exception, path: Path) -> str:
    """Return an error with the last line of the user's file that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"
    own = [frame for frame in frames if Path(frame.filename).name == path.name]
    place = f"{path.name}:{own[-1].lineno} ({own[-1].line}): " if own else ""
    text = " ".join(str(error).split()) or "no message"
    return f"{place}{type(error).__name__}: {text}"
