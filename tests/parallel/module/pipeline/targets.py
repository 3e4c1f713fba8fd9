"""What ranks run in the tests of pipelines of any module, and what one process makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.errors import EchelonError
from echelon.core.event import EventList
from echelon.core.plan import Optimizer, Plan
from echelon.launch.context import RankContext
from echelon.layout.modules import ModuleBuckets
from echelon.proof.verify.reference import StayWide
from echelon.training.module.optimizer import ModuleOptimizer
from tests.parallel.layouts import NANO, plan_of
from tests.parallel.module.models import LENGTH, VOCAB, Transformer

Values = dict[str, torch.Tensor]
OPTIMIZER = Optimizer(total_steps=8, clip_norm=0.5, eps=1e-3, warmup_steps=2, learning_rate=1e-2)


def own(**changes: Any) -> nn.Module:
    """Return the transformer of these tests: a tied head, a frozen table."""
    torch.manual_seed(5)
    return Transformer(**changes).double()


def stock(kind: str, **changes: Any) -> nn.Module:
    """Return a small model of transformers, made from a configuration."""
    import transformers

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    if kind == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 16}
        sizes |= {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if kind == "gemma2":
        sizes |= {"head_dim": 4, "sliding_window": 3}
    if kind == "phi3":
        sizes |= {"pad_token_id": 0}
    config: Any = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    return model.double()


SPLITS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "own": "blocks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module, a plan and what is done."""

    plan: Plan
    kind: str = "own"
    changes: dict[str, Any] | None = None
    steps: int = 3
    length: int = LENGTH

    @property
    def split(self) -> str:
        """Return the name of the list of blocks."""
        return SPLITS.get(self.kind, "model.layers")

    def make(self) -> nn.Module:
        """Return the module."""
        changes = self.changes or {}
        return own(**changes) if self.kind == "own" else stock(self.kind, **changes)

    def batch(self, step: int) -> dict[str, Any]:
        """Return the global batch of a step; microbatches count different numbers of tokens."""
        made = torch.Generator().manual_seed(100 + step)
        shape = (self.plan.mathematics.global_sequences, self.length)
        ids = torch.randint(VOCAB, shape, generator=made)
        labels = ids.clone()
        labels[0, 2:] = -100
        return {"tokens" if self.kind == "own" else "input_ids": ids, "labels": labels}

    def example(self) -> dict[str, Any]:
        """Return one microbatch."""
        count = self.plan.layout.microbatch_sequences
        return {name: one[:count] for name, one in self.batch(99).items()}


def plan(**changes: Any) -> Plan:
    """Return a plan over two stages, or over those that `changes` name."""
    model = replace(NANO, layers=changes.pop("layers", 4))
    given = {"model": model, "optimizer": OPTIMIZER, "bucket_bytes": 2000, "pp": 2, **changes}
    return plan_of(**{"microbatches": 4, **given})


@dataclass(slots=True, kw_only=True)
class Trained:
    """What a rank saw."""

    losses: list[float]
    norms: list[float]
    gradients: Values
    after: Values
    sent: dict[str, int]
    buckets: ModuleBuckets
    evaluated: float


def train(context: RankContext, case: Case) -> Trained:
    """Train on this rank; gradients are those of the last step."""
    with StayWide():
        return _train(context, case)


def _train(context: RankContext, case: Case) -> Trained:
    model, events = case.make(), EventList()
    if context.rank > 0:
        with torch.no_grad():
            for one in model.parameters():
                one.add_(1.0)
    model, optimizer = parallelize(
        model, case.plan, split=case.split, loss="causal", example=case.example(), events=events
    )
    losses: list[float] = []
    norms: list[float] = []
    gradients: Values = {}
    for step in range(case.steps):
        events.events.clear()
        losses.append(optimizer.backward(case.batch(step)).loss)
        norms.append(optimizer.step().grad_norm)
    sent = events.bytes_by_axis()
    sent.pop("world", None)
    after: Values = {}
    optimizer.full_state(lambda kind, name, one: after.__setitem__(f"{kind} {name}", one))
    evaluated = optimizer.evaluate(case.batch(50)).loss
    optimizer.close()
    return Trained(
        losses=losses,
        norms=norms,
        gradients=gradients,
        after=after,
        sent=sent,
        buckets=optimizer.module.plans,
        evaluated=evaluated,
    )


def one_process(case: Case) -> Trained:
    """Train the module as it is, on whole global batches, with torch alone."""
    with StayWide():
        return _one_process(case)


def _one_process(case: Case) -> Trained:
    from torch.nn import functional

    model, settings = case.make(), case.plan.mathematics.optimizer
    from echelon.training.optimizer.step import learning_rate

    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": settings.weight_decay if p.dim() > 1 else 0.0}
            for p in trained.values()
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )

    def loss_of(batch: dict[str, Any]) -> torch.Tensor:
        given = {name: one for name, one in batch.items() if name != "labels"}
        output = model(**given)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        ahead = logits[:, :-1].double().flatten(0, 1)
        return functional.cross_entropy(ahead, batch["labels"][:, 1:].flatten())

    losses: list[float] = []
    norms: list[float] = []
    gradients: Values = {}
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = loss_of(case.batch(step))
        loss.backward()
        losses.append(loss.item())
        gradients = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in trained.values()]))  # pyright: ignore[reportArgumentType]
        norms.append(norm)
        clip = settings.clip_norm or norm
        for parameter in trained.values():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, clip / norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
    with torch.no_grad():
        evaluated = loss_of(case.batch(50)).item()
    after = {f"parameters {n}": p.detach().clone() for n, p in model.named_parameters()}
    after |= {
        f"{kind} {name}": optimizer.state[one][key]
        for name, one in trained.items()
        for kind, key in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))
    }
    return Trained(
        losses=losses,
        norms=norms,
        gradients=gradients,
        after=after,
        sent={},
        buckets=ModuleBuckets(trained=(), frozen=()),
        evaluated=evaluated,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Tensors and progress of one layout, to go on from in another."""

    tensors: Values
    progress: dict[str, Any]


def save(context: RankContext, case: Case) -> Saved:
    """Train one step, and return everything (tensors on rank 0)."""
    _, optimizer = split(case)
    optimizer.backward(case.batch(0))
    optimizer.step()
    return Saved(tensors=everything(optimizer), progress=optimizer.progress())


def resume(context: RankContext, given: tuple[Case, Saved]) -> tuple[Values, list[float], Values]:
    """Go on from what another layout saved for two steps; what `whole` shows at the end."""
    case, saved = given
    model, optimizer = split(case)
    optimizer.load_full_state(lambda kind, name: saved.tensors[f"{kind} {name}"], saved.progress)
    losses: list[float] = []
    for step in range(1, 3):
        losses.append(optimizer.backward(case.batch(step)).loss)
        optimizer.step()
    with optimizer.whole():
        shown = {name: one.detach().clone() for name, one in model.named_parameters()}
    return everything(optimizer), losses, shown


def split(case: Case) -> tuple[nn.Module, ModuleOptimizer]:
    """Return a module of a case and its optimizer."""
    return parallelize(
        case.make(), case.plan, split=case.split, loss="causal", example=case.example()
    )


def everything(optimizer: ModuleOptimizer) -> Values:
    """Return every whole tensor, on rank 0."""
    found: Values = {}
    optimizer.full_state(lambda kind, name, one: found.__setitem__(f"{kind} {name}", one))
    return found


def mistakes(context: RankContext, case: Case) -> dict[str, str]:
    """Return the errors of what goes wrong in a loop, by what was done."""
    model, optimizer = split(case)
    said: dict[str, str] = {}

    def refused(what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except EchelonError as error:
            said[what] = str(error)

    batch = case.batch(0)
    given = {name: one for name, one in batch.items() if name != "labels"}
    refused("forward", lambda: model(**given))
    refused("state_dict", model.state_dict)
    refused("step", optimizer.step)
    refused("batch", lambda: optimizer.backward({n: one[1:] for n, one in batch.items()}))
    mine = case.batch(context.rank)
    refused("ranks", lambda: optimizer.backward(mine))
    optimizer.backward(batch)
    refused("twice", lambda: optimizer.backward(batch))
    optimizer.zero_grad()
    optimizer.backward(batch)
    optimizer.step()
    return said


def unused(context: RankContext, case: Case) -> tuple[str, float]:
    """Return what is said of a parameter that nothing uses, and the norm where that is meant."""
    errors, norm = "", 0.0
    for meant in ("error", "zero"):
        model = case.make()
        model.add_module("spare", nn.Linear(2, 2).double())
        _, optimizer = parallelize(
            model,
            case.plan,
            split=case.split,
            loss="causal",
            example=case.example(),
            unused="error" if meant == "error" else "zero",
        )
        optimizer.backward(case.batch(0))
        try:
            norm = optimizer.step().grad_norm
        except EchelonError as error:
            errors = str(error)
    return errors, norm
