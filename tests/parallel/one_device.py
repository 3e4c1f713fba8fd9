"""The same training on one device, in a few lines of plain PyTorch: what ranks are compared with.

Written apart from the engine: the plain decoder, autograd, the global batch at once, torch's own
AdamW on one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from echelon.core.attention_mask import DocumentStarts
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.counter_random import initial_values, make_key, normal_pieces
from echelon.models.decoder import Decoder
from echelon.parallel.storage.weights import Shard
from echelon.training.optimizer.step import learning_rate

Values = dict[str, torch.Tensor]

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def normal_rectangle(
    key: int, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> torch.Tensor:
    """Return the rectangle at `offset` of a standard normal tensor of `shape`, float64."""
    whole = torch.empty(size, dtype=torch.float64)
    for part, values in normal_pieces(whole, key, shape, offset):
        part.copy_(values)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A global batch, one sequence per row."""

    sample_ids: tuple[int, ...]
    inputs_BT: torch.Tensor
    labels_BT: torch.Tensor
    seed: int
    documents: DocumentStarts | None = None

    def batch(self, step: int) -> TokenBatch:
        """Return all rows as one batch."""
        return TokenBatch.from_rows(
            self.inputs_BT,
            self.labels_BT,
            torch.tensor(self.sample_ids),
            step=step,
            seed=self.seed,
        ).cut((), self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """What one device computed in a step; gradients are those before clipping."""

    loss: float
    grad_norm: float
    tokens: int
    gradients: Values
    after: Values


def make_rows(plan: Plan, step: int) -> Rows:
    """Return random rows, each with another number of counted labels."""
    generator = torch.Generator().manual_seed(1000 + step)
    sequences, length = plan.mathematics.global_sequences, plan.mathematics.sequence_length
    tokens = torch.randint(plan.model.vocab, (sequences, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(sequences):
        labels[row, : row % (length - 1)] = IGNORED_LABEL
    ids = torch.randperm(1000, generator=generator)[:sequences]
    return Rows(
        sample_ids=tuple(int(i) for i in ids),
        inputs_BT=tokens[:, :-1],
        labels_BT=labels,
        seed=plan.mathematics.seed,
        documents=tuple((0, 1 + row % (length - 2), length - 1) for row in range(sequences))
        if plan.mathematics.documents == "separate"
        else None,
    )


def decoder(plan: Plan, values: Mapping[str, torch.Tensor] | None = None) -> Decoder:
    """Return the whole model with `values`, or with its first values."""
    model = Decoder(plan.model).to(DTYPES[plan.mathematics.precision.parameters])
    with torch.no_grad():
        for spec in parameters(plan.model):
            value = (
                initial_values(plan.model, spec, plan.mathematics.seed)
                if values is None
                else values[spec.name]
            )
            model.get_parameter(spec.name).copy_(value)
    return model


def random_values(plan: Plan) -> Values:
    """Return values of which none is zero or one, so that each bias and norm matters."""
    return {
        spec.name: normal_rectangle(
            make_key("test", spec.name), spec.shape, (0,) * len(spec.shape), spec.shape
        )
        * 0.3
        for spec in parameters(plan.model)
    }


def train(plan: Plan, num_steps: int) -> list[OneStep]:
    """Return the steps of `plan` on one device."""
    model, settings = decoder(plan), plan.mathematics.optimizer
    named = dict(model.named_parameters())
    adamw = torch.optim.AdamW(
        [
            {
                "params": [parameter],
                "weight_decay": settings.weight_decay if parameter.dim() > 1 else 0.0,
            }
            for parameter in named.values()
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        foreach=False,
    )
    steps: list[OneStep] = []
    for step in range(num_steps):
        batch = make_rows(plan, step).batch(step)
        adamw.zero_grad()
        loss = model(None, batch) / batch.num_valid()
        loss.backward()
        gradients = {name: gradient(one).clone() for name, one in named.items()}
        clip = float("inf") if settings.clip_norm is None else settings.clip_norm
        norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients.values()]))
        for one in named.values():
            gradient(one).mul_(min(1.0, clip / float(norm)))
        for group in adamw.param_groups:
            group["lr"] = learning_rate(settings, step)
        adamw.step()
        steps.append(
            OneStep(
                loss=float(loss.detach()),
                grad_norm=float(norm),
                tokens=batch.num_valid(),
                gradients=gradients,
                after={name: one.detach().clone() for name, one in named.items()},
            )
        )
    return steps


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def assemble(plan: Plan, ranks: Iterable[Mapping[str, list[Shard]]]) -> Values:
    """Return whole tensors from the shards of all ranks.

    Primary shards must cover each tensor exactly once, and every copy must equal the primary one.
    """
    held = list(ranks)
    whole: Values = {}
    for spec in parameters(plan.model):
        shards = [shard for rank in held for shard in rank.get(spec.name, [])]
        primary = [shard for shard in shards if shard.primary]
        value = torch.full(spec.shape, float("nan"), dtype=primary[0].tensor.dtype)
        for shard in primary:
            assert value[place(shard)].isnan().all(), f"{spec.name} is held twice"
            value[place(shard)] = shard.tensor
        for shard in shards:
            torch.testing.assert_close(
                value[place(shard)], shard.tensor, rtol=0, atol=0, equal_nan=True, msg=spec.name
            )
        whole[spec.name] = value
    return whole


def place(shard: Shard) -> tuple[slice, ...]:
    """Return where a shard lies in the whole."""
    return tuple(
        slice(start, start + size)
        for start, size in zip(shard.offset, shard.tensor.shape, strict=True)
    )
