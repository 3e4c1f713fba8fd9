# SPDX-License-Identifier: Apache-2.0
"""`ec.parallelize`: your own module and your own loop, under a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from echelon.api.given_plan import GivenPlan, plan_from_given
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.module import MODULE_ARGUMENT

if TYPE_CHECKING:
    from torch import nn

    from echelon.core.event import EventSink
    from echelon.parallel.module.loss import Batch, LossChoice
    from echelon.training.module.optimizer import ModuleOptimizer


if TYPE_CHECKING:
    from torch import nn

    from echelon.core.event import EventSink
    from echelon.parallel.threads.module import Place, ThreadedModule

WORDS = {
    "unused": ("error", "zero"),
    "gradients": ("mean", "sum"),
    "learning_rate": ("plan", "own"),
    "guess": ("prove", "accept"),
}


Model = TypeVar("Model", bound="nn.Module")


def parallelize(  # noqa: PLR0913 - each is one choice of the caller, by its name
    model: Model,
    plan: GivenPlan,
    *,
    units: str | int | type[nn.Module] | tuple[type[nn.Module], ...] | Sequence[str] = "blocks",
    unused: Literal["error", "zero"] = "error",
    gradients: Literal["mean", "sum"] = "mean",
    learning_rate: Literal["plan", "own"] = "plan",
    ignore: Sequence[str] = (),
    tensor: Mapping[str, str | tuple[str, int | Sequence[int]]] | Literal["auto", "guess"] = "auto",
    guess: Literal["prove", "accept"] = "prove",
    split: str = "",
    loss: LossChoice | None = None,
    example: Batch | Sequence[Any] | None = None,
    events: EventSink | None = None,
) -> tuple[Model, ModuleOptimizer]:
    """Split any module over the ranks of `plan`; return it, and the optimizer of your loop.

    Of the plan (or of the answer of `ec.plan`), this uses the mesh (data, `tp`, `pp`, `cp`),
    pipeline, ZeRO, precision and optimizer. Every rank calls it after its process group is there;
    parameters become those of rank 0. The module keeps its class, its parameters and its hooks, and
    is trained as before:

        torch.distributed.init_process_group("gloo")
        model, optimizer = ec.parallelize(model, plan)
        loss = compute(model(batch))
        optimizer.scale(loss).backward()
        optimizer.step()

    `units` says what is gathered at a time at stage 3 (see `parallel/module/module.py`), `unused`
    what a parameter without a gradient is, `gradients` whether those of data ranks are averaged (as
    in DDP) or summed, `learning_rate` whether the plan's schedule is used or your own. Parameters
    or modules in `ignore` stay yours on every rank.

    With mesh.tp > 1, `tensor` says which layers are cut how, by patterns of names (see
    `parallel/module/tensor/rules.py`), "auto" for what a class of transformers says, or "guess"
    from a forward of `example`, which is refused until `guess="accept"` says that it was proven.
    Tensor ranks are given the same batch: that of `optimizer.data_rank`.

    `events` takes what is sent, call by call.

    With a `loss`, a step takes a global batch, the same on every rank, and the plan may cut the
    module into pipeline stages, too: `split` names the list of its blocks, and `example` is one
    microbatch, by which its forward is followed once and each stage checked alone. Context ranks
    cut its sequences where it calls `scaled_dot_product_attention`, and need no `split`.

        model, optimizer = ec.parallelize(
            model, plan, split="model.layers", loss="causal", example=microbatch
        )
        report = optimizer.backward(batch)
        optimizer.step()

    The loss is "causal" (`logits` against `labels`), or two functions: the sum of a microbatch's
    losses from the module's output and the batch, and what it counts, from the batch alone.

    Every rank takes as many steps, forward and backward passes as the others; inside of them, ranks
    may take other branches. Raises EchelonError where something does not fit.
    """
    said = {
        "unused": unused,
        "gradients": gradients,
        "learning_rate": learning_rate,
        "guess": guess,
    }
    problems: list[Problem] = [
        MODULE_ARGUMENT.problem(
            f"{key} = {said[key]!r}", key=key, suggestions=[f"{key}={word!r}" for word in words]
        )
        for key, words in WORDS.items()
        if said[key] not in words
    ]
    if problems:
        raise ConfigError(problems)
    from echelon.core.optional import optional_package

    optional_package("torch", extra="train", purpose="training")
    from echelon.launch.host import give_back_freed_memory
    from echelon.training.module.parallelized import Choices, parallelized

    choices = Choices(
        units=units,
        unused=unused,
        gradients=gradients,
        learning_rate=learning_rate,
        ignore=ignore,
        tensor=tensor,
        accepts_guess=guess == "accept",
        split=split,
        loss=loss,
        example=example,
    )
    optimizer = parallelized(plan_from_given(plan), model, choices, events)
    # Parameters have moved into buckets, and what they were in is not asked for again.
    give_back_freed_memory()
    return model, optimizer


Replicated = TypeVar("Replicated", bound="nn.Module")


def threaded(
    module: Replicated,
    *,
    replicas: int | None = None,
    devices: Sequence[Place] | None = None,
    dim: int = 0,
    whole: Sequence[str] = (),
    events: EventSink | None = None,
) -> ThreadedModule[Replicated]:
    """Compute any module on replicas in threads of this process, as `torch.nn.DataParallel` did.

        model = ec.threaded(net, replicas=2)         # or devices=["cuda:0", "cuda:1"]
        model(x).square().mean().backward()          # x [B, ...] -> [B, ...]: the full batch
        optimizer.step()                             # over net.parameters(), as before

    Each forward pass cuts the tensors among its arguments along `dim` (in tuples, lists and dicts
    too), gives parameters and buffers to the replicas, runs them side by side, and returns their
    outputs joined along `dim`; backward adds the gradients of all up onto the parameters of
    `module`. Arguments named in `whole` go to each replica as they are. `replicas` are on the CPU,
    or on the first GPUs where the module is on one; `devices` says where each is, the first being
    where the module is. A batch need not be even, and with fewer rows than replicas the last ones
    rest. Of buffers, what the first replica changes stays, and what others change is lost.

    `with model.step():` replicates once for several passes. `model.sent` are the bytes that went
    through the first device; `events` takes them one by one. Raises ConfigError where something
    does not fit; what a replica raises is raised with a note that says which one it was.
    """
    from echelon.core.optional import optional_package

    optional_package("torch", extra="train", purpose="replicas on threads")
    from echelon.parallel.threads.module import ThreadedModule, devices_of, require_cut

    found = devices_of(module, replicas, devices)
    require_cut(module, dim, whole)
    return ThreadedModule(module, found, dim=dim, whole=whole, sink=events)
