# SPDX-License-Identifier: Apache-2.0
"""`ec.strategy`: a strategy by its name, and a scope in which models are made for it.

A facade over `ec.plan`, `ec.train`, `ec.prove` and `ec.parallelize`: a name becomes the settings of
its record in `core/choices/strategies.py`, and the engine is the one that runs every plan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from echelon.api.parallelizing import parallelize
from echelon.api.planning import prove
from echelon.api.training import TrainResult, launched_servers, launched_world_size, train
from echelon.config.load import load_job
from echelon.core.choices.strategies import (
    STRATEGIES,
    StrategyRecord,
    find_strategy,
    why_no_strategy,
)
from echelon.core.errors import ConfigError
from echelon.core.messages.names import names_within
from echelon.core.optional import optional_package
from echelon.core.plan import Plan
from echelon.core.rulebook.module import (
    STRATEGY_KNOWN,
    STRATEGY_RANKS,
    STRATEGY_SCOPE,
    STRATEGY_SETTINGS,
)

if TYPE_CHECKING:
    from torch import nn

    from echelon.layout.buckets import Variable
    from echelon.proof.verdict import Proof
    from echelon.training.module.optimizer import ModuleOptimizer

Module = TypeVar("Module", bound="nn.Module")


def strategy(name: str, *, ranks: int | None = None) -> DistributionStrategy:
    """Return a strategy by its name: one of ours, or what another framework calls it.

        with ec.strategy("mirrored", ranks=2).scope() as scope:
            model = scope.model("nano")
        history = model.fit(data="stdlib")

    `ranks` are the ranks (of "parameter-server" the workers) that it is for: by default those that
    have been started, or 1. Raises ConfigError where there is no such strategy.
    """
    record = find_strategy(name)
    if record is None:
        raise ConfigError(
            STRATEGY_KNOWN.problem(why_no_strategy(name), key="name", suggestions=_near(name))
        )
    started = _started_ranks()
    if started is not None and record.servers:
        record = replace(record, servers=launched_servers() or record.servers)
        started = max(started - record.servers, 1)
    count = ranks if ranks is not None else started or 1
    if count < 1 or (started is not None and count != started):
        said = "" if started is None else f", and {started} have been started"
        raise ConfigError(
            STRATEGY_RANKS.problem(
                f"ranks = {count}{said}", key="ranks", suggestions=[f"ranks={started or 2}"]
            )
        )
    return DistributionStrategy(name=name, record=record, ranks=count)


def _started_ranks() -> int | None:
    """Return how many ranks there are already: of an open process group, or of a launcher."""
    if "torch" in sys.modules:
        from echelon.launch.process_group import open_world_size

        if (found := open_world_size()) is not None:
            return found
    return launched_world_size()


def _near(name: str) -> tuple[str, ...]:
    return tuple(f'"{one}"' for one in names_within(name, STRATEGIES)) or ('"dp"', '"zero3"')


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionStrategy:
    """A way to split runs: a record, and the number of ranks."""

    name: str
    """What it was asked for as."""
    record: StrategyRecord
    """What that is here."""
    ranks: int
    """Ranks that it is for."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Return how many replicas see other samples and update together."""
        return self.record.replicas(self.ranks)

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the settings that make a run one of this strategy."""
        return self.record.settings(self.ranks)

    @contextmanager
    def scope(self) -> Iterator[StrategyScope]:
        """Open a scope: what is made in it is split by this strategy."""
        scope = StrategyScope(self)
        with scope.opened():
            yield scope


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Say how a `fit` went: where the run is, and the loss of each step."""

    run: TrainResult
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopedModel:
    """Hold a model of Echelon under a strategy: a run, and the plan that it becomes."""

    strategy: DistributionStrategy
    run: str | Path
    settings: tuple[str, ...]
    plan: Plan

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Return every variable: on how many ranks there are copies, and how each is cut."""
        from echelon.layout.buckets import variables_of

        return variables_of(self.plan)

    def fit(self, *, data: str | None = None, settings: Sequence[str] = ()) -> History:
        """Train, and return the run with its losses; `settings` are those of this training.

        Raises what `ec.train` raises, and ConfigError where a setting is the strategy's.
        """
        _require_free(self.strategy, settings)
        every = (*self.strategy.settings, *self.settings, *settings)
        result = train(self.run, data=data, settings=every)
        from echelon.telemetry.summary import step_losses

        return History(run=result, losses=step_losses(result.run))

    def prove(self) -> Proof:
        """Return the proof that this model computes what one process computes."""
        return prove(self.plan)


class StrategyScope:
    """Make models for a strategy, and know the parameters that were made in here."""

    def __init__(self, strategy: DistributionStrategy) -> None:
        """Belong to `strategy`; nothing is made before it is opened."""
        self.strategy = strategy
        self._open = False
        self._made: Any = {}

    @property
    def num_replicas_in_sync(self) -> int:
        """Return that of the strategy."""
        return self.strategy.num_replicas_in_sync

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Note every parameter that a module gets inside."""
        optional_package("torch", extra="train", purpose="a strategy's scope")
        from torch.nn.modules.module import register_module_parameter_registration_hook
        from torch.utils.weak import WeakIdKeyDictionary

        self._made = WeakIdKeyDictionary()

        def note(module: object, name: str, parameter: object) -> None:
            if parameter is not None:
                self._made[parameter] = True

        hook = register_module_parameter_registration_hook(note)
        self._open = True
        try:
            yield
        finally:
            self._open = False
            hook.remove()

    def model(self, run: str | Path, *, settings: Sequence[str] = ()) -> ScopedModel:
        """Return a model of Echelon, of a run file or preset, under the strategy.

        Raises ConfigError where its rules refuse the model, or a setting is the strategy's.
        """
        self._require_open()
        _require_free(self.strategy, settings)
        every = (*self.strategy.settings, *settings)
        plan = load_job(run, every).plan
        return ScopedModel(strategy=self.strategy, run=run, settings=tuple(settings), plan=plan)

    def parallelize(
        self, module: Module, *, run: str | Path = "nano", settings: Sequence[str] = ()
    ) -> tuple[Module, ModuleOptimizer]:
        """Return a module that was made in here, split over the ranks, with its optimizer.

        What `ec.parallelize` does: data strategies only. Precision and optimizer are those of `run`
        with `settings`. Raises ConfigError where the module was made elsewhere.
        """
        self._require_open()
        _require_free(self.strategy, settings)
        outside = [name for name, one in module.named_parameters() if one not in self._made]
        if outside:
            raise ConfigError(
                STRATEGY_SCOPE.problem(
                    f"{', '.join(outside[:3])} of {type(module).__name__} "
                    f"{'was' if len(outside) == 1 else 'were'} not made in this scope",
                    key="module",
                    suggestions=("make the module inside of the with block",),
                )
            )
        plan = load_job(run, (*self.strategy.settings, *settings)).plan
        return parallelize(module, plan)

    def _require_open(self) -> None:
        if not self._open:
            raise ConfigError(
                STRATEGY_SCOPE.problem(
                    f"the scope of {self.strategy.name!r} has been left",
                    key="scope",
                    suggestions=("with strategy.scope() as scope: ...",),
                )
            )


def _require_free(strategy: DistributionStrategy, settings: Sequence[str]) -> None:
    """Raise ConfigError where a setting is one that the strategy sets."""
    own = {one.partition("=")[0] for one in strategy.settings}
    taken = [one for one in settings if one.partition("=")[0].strip() in own]
    if taken:
        raise ConfigError(
            [
                STRATEGY_SETTINGS.problem(
                    f"{one} is what the strategy {strategy.name!r} says: "
                    f"{next(s for s in strategy.settings if s.startswith(one.partition('=')[0]))}",
                    key=one.partition("=")[0],
                    suggestions=(f"settings without {one}", "ec.plan, without a strategy"),
                )
                for one in taken
            ]
        )
