# SPDX-License-Identifier: Apache-2.0
"""A user's own module as a subject of a proof: on one device, and by `ec.parallelize` on ranks.

    def make():
        model = Net()
        def batch(step, data_rank): ...        # what a data rank reads in a step
        def loss(model, batch): ...            # the loss of it, a tensor of one number
        return model, batch, loss              # and, if wanted, what parallelize takes by name

One device takes the mean of the losses of all data ranks.

A loss may also be what `parallelize` takes for one ("causal", or a sum and a count); batches are
mappings of tensors then, and one device computes the global batch of all data ranks. A plan with
stages or context ranks asks for that, and for `split` where there are stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.axis import Axis
from echelon.core.errors import ConfigError
from echelon.core.plan import Optimizer, Plan
from echelon.core.rulebook.verify import VERIFY_OPTIMIZER, VERIFY_RETURNED
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.module.loss import ModuleLoss, loss_of
from echelon.proof.claims.numeric_range import in_float64
from echelon.proof.verify.case import OneDevice, OnRank, VerifyCase
from echelon.proof.verify.reference import StayWide
from echelon.proof.verify.subject_file import NUM_STEPS, SubjectFile, SubjectSettings
from echelon.training.optimizer.step import learning_rate

if TYPE_CHECKING:
    pass

OPENER = "echelon.api.module_subject:open_module"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Hold what the user's factory returned."""

    model: nn.Module
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    whole: ModuleLoss | None
    """The loss of a global batch, where the factory returned one; `loss` is not used then."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def open_module(argument: Mapping[str, Any]) -> SubjectFile:
    """Return the subject of a file with a factory, and of a plan."""
    return ModuleSubject(
        Path(argument["file"]),
        Plan.from_json(argument["plan"]),
        argument["num_steps"],
        quick=argument.get("quick", False),
    )


class ModuleSubject(SubjectFile):
    """Call a user's factory, and train what it makes."""

    def __init__(
        self, path: Path, plan: Plan, num_steps: int = NUM_STEPS, *, quick: bool = False
    ) -> None:
        """Import the file; ConfigError where it cannot be, or lacks the factory.

        It is proven in float64 and, unless it is `quick`, in the precision of the plan.
        """
        self.plan, self._num_steps, self._quick = plan, num_steps, quick
        super().__init__(path)

    def required(self) -> tuple[str, ...]:
        """Return the factory."""
        return (self.function,)

    def settings(self, ranks: int | None) -> SubjectSettings:
        """Return what the plan says."""
        mesh = self.plan.mesh
        axes = [axis for axis in mesh.order if axis is not Axis.EP]
        degrees = {axis.value: mesh.degree(axis) for axis in axes if mesh.degree(axis) > 1}
        own = TORCH_DTYPES[self.plan.mathematics.precision.parameters]
        dtype = torch.float64 if self._quick else own
        return SubjectSettings(
            degrees=degrees or {"dp": 1},
            dtype=str(dtype).removeprefix("torch."),
            num_steps=self._num_steps,
        )

    def one_device(self, case: VerifyCase) -> OneDevice:
        """Return the training of the whole batch by torch's own optimizer."""
        made = self._make(case)
        num_data_ranks = self.plan.mesh.dp

        def loss(step: int) -> torch.Tensor:
            if made.whole is not None:
                batch = made.whole.prepare(self._global_batch(made, step))
                with _width(case):
                    output = made.model(**made.whole.inputs(batch))
                    return made.whole.sum_of(output, batch) / made.whole.count_of(batch)
            with _width(case):
                losses = [
                    made.loss(made.model, made.batch(step, rank)) for rank in range(num_data_ranks)
                ]
            return torch.stack(losses).mean()

        optimizer = plain_optimizer(self.plan.mathematics.optimizer, made.model)
        return OneDevice(model=made.model, loss=loss, optimizer=optimizer)

    def on_rank(self, case: VerifyCase) -> OnRank:
        """Return the loop of one rank of the plan."""
        made = self._make(case)
        options = dict(made.options)
        options.setdefault("guess", "accept")
        if made.whole is not None:
            microbatch = self.plan.layout.microbatch_sequences
            first = self._global_batch(made, 0)
            options["loss"] = made.whole
            options.setdefault("example", {n: _rows(one, microbatch) for n, one in first.items()})
        plan = in_precision(self.plan, case.dtype)
        with self.calling("parallelize"), _width(case):
            model, optimizer = parallelize(made.model, plan, **options)

        # A wrong gradient is for the proof to name.
        optimizer.watches_ranks = False
        if optimizer.module.link is not None:
            optimizer.module.link.watches = False

        def step(number: int) -> Mapping[str, float]:
            if made.whole is not None:
                with _width(case):
                    whole = optimizer.backward(self._global_batch(made, number))
                return {"loss": whole.loss, "grad_norm": optimizer.step().grad_norm}
            with _width(case):
                loss = made.loss(model, made.batch(number, optimizer.data_rank))
            optimizer.scale(loss).backward()
            report = optimizer.step()
            return {"loss": float(loss.detach()), "grad_norm": report.grad_norm}

        return OnRank(model=model, optimizer=optimizer, step=step, close=optimizer.close)

    def _make(self, case: VerifyCase) -> _Made:
        torch.manual_seed(case.seed)
        with self.calling(self.function):
            made: Any = getattr(self.program, self.function)()
        fits = isinstance(made, tuple) and len(made) in (3, 4) and isinstance(made[0], nn.Module)
        if not fits or not callable(made[1]):
            raise ConfigError(
                VERIFY_RETURNED.problem(
                    f"{self.function} returned {type(made).__name__}, and not a module, a function "
                    "of step and data rank, and a function of module and batch",
                    suggestions=("return model, batch, loss",),
                )
            )
        model, batch, _, *rest = made
        options: Mapping[str, Any] = rest[0] if rest else {}
        whole = None if callable(made[2]) else loss_of(made[2])
        self._require_whole(whole)
        return _Made(
            model=model.to(case.dtype), batch=batch, loss=made[2], whole=whole, options=options
        )

    def _require_whole(self, whole: ModuleLoss | None) -> None:
        """ConfigError where a plan takes global batches, and the loss is that of a data rank."""
        mesh = self.plan.mesh
        cut = {"mesh.pp": mesh.pp, "mesh.cp": mesh.cp}
        if whole is None and any(degree > 1 for degree in cut.values()):
            key = next(key for key, degree in cut.items() if degree > 1)
            raise ConfigError(
                VERIFY_RETURNED.problem(
                    f"{key} = {cut[key]} takes global batches, and the loss that {self.function} "
                    "returned is of a module and the batch of a data rank",
                    key=key,
                    suggestions=(
                        "return model, batch, 'causal', {'split': 'model.layers'}",
                        "return model, batch, (sum_of, count_of)",
                    ),
                )
            )

    def _global_batch(self, made: _Made, step: int) -> dict[str, Any]:
        """Return what all data ranks read in a step, in their order."""
        num_data_ranks = self.plan.mesh.dp
        shares: list[Any] = [made.batch(step, rank) for rank in range(num_data_ranks)]
        if not all(isinstance(share, Mapping) for share in shares):
            raise ConfigError(
                VERIFY_RETURNED.problem(
                    f"batches are {type(shares[0]).__name__}, and a global batch is named tensors",
                    suggestions=('{"input_ids": ids, "labels": ids}',),
                )
            )
        size = self.plan.mathematics.global_sequences // num_data_ranks
        return {
            name: torch.cat([share[name] for share in shares]) if _has_rows(one, size) else one
            for name, one in shares[0].items()
        }


def _has_rows(one: Any, size: int) -> bool:
    return isinstance(one, torch.Tensor) and one.dim() > 0 and len(one) == size


def _rows(one: Any, size: int) -> Any:
    return one[:size] if isinstance(one, torch.Tensor) and one.dim() > 0 else one


def _width(case: VerifyCase) -> AbstractContextManager[object]:
    return StayWide() if case.dtype is torch.float64 else nullcontext()


def in_precision(plan: Plan, dtype: torch.dtype) -> Plan:
    """Return a plan as it is, or in float64 throughout."""
    return in_float64(plan) if dtype is torch.float64 else plan


def plain_optimizer(settings: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own optimizer with the settings of a plan, its clipping and its schedule."""
    groups = [
        {"params": [one], "weight_decay": settings.weight_decay * _decays(settings, one)}
        for one in model.parameters()
        if one.requires_grad
    ]
    optimizer: torch.optim.Optimizer
    if settings.kind == "adamw":
        optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
        )
    elif settings.kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum)
    else:
        raise ConfigError(
            VERIFY_OPTIMIZER.problem(
                f"a module is proven beside torch's own optimizer, and optimizer.kind = \""
                f'{settings.kind}" is none',
                key="optimizer.kind",
                suggestions=('optimizer.kind = "adamw"', 'optimizer.kind = "sgd"'),
            )
        )
    steps = iter(range(1 << 30))

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = [one for group in optimizer.param_groups for one in group["params"]]
        gradients = [one.grad for one in own if one.grad is not None]
        norm = sum(float(one.double().square().sum()) for one in gradients) ** 0.5
        if settings.clip_norm is not None and norm > settings.clip_norm:
            for one in gradients:
                one.mul_(settings.clip_norm / norm)
        rate = learning_rate(settings, next(steps))
        for group in optimizer.param_groups:
            group["lr"] = rate

    optimizer.register_step_pre_hook(before)
    return optimizer


def _decays(settings: Optimizer, parameter: nn.Parameter) -> bool:
    return settings.decay == "all" or (settings.decay == "matrices" and parameter.dim() > 1)
