"""Another engine for the prover: plain data parallelism on torch's own optimizer, whole and broken.

It shares nothing with Echelon's engine but the decoder, so it also shows that the oracle is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.decoder import Decoder
from echelon.parallel.storage.weights import Shard
from echelon.proof.oracle.oracle import build_decoder, initial_parameters
from echelon.proof.subject import ProofBatch, StepRecord
from echelon.training.optimizer.step import learning_rate

Gradients = dict[str, torch.Tensor]


class Toy:
    """Train the whole model on this rank's rows; sum gradients one parameter at a time."""

    def __init__(self, place: RankContext, plan: Plan) -> None:
        """Build the model and torch's AdamW, without decay for vectors."""
        self.plan, self.rank = plan, place.rank
        self.model: Decoder = build_decoder(plan, initial_parameters(plan))
        settings = plan.mathematics.optimizer
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            foreach=False,
        )
        self.kept: Gradients = {}

    def step(self, batch: ProofBatch, step: int) -> StepRecord:
        """Take one step."""
        tokens = int((batch.labels_BT != IGNORED_LABEL).sum())
        losses: dict[tuple[int, int], tuple[float, int]] = {}
        samples: list[int] = []
        self.optimizer.zero_grad()
        for number in range(self.plan.num_microbatches):
            rows = batch.microbatch(self.plan, self.rank, number)
            own = TokenBatch.from_rows(
                rows.inputs_BT,
                rows.labels_BT,
                torch.tensor(rows.sample_ids),
                step=step,
                seed=self.plan.mathematics.seed,
            )
            loss = self.model(None, own)
            (loss / tokens).backward()
            losses[self.rank, number] = float(loss.detach()), own.num_valid()
            samples += rows.sample_ids
        total = torch.tensor(sum(value for value, _ in losses.values()), dtype=torch.float64)
        dist.all_reduce(total)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.after_reduction()
        self.kept = {n: p.grad.clone() for n, p in self._named() if p.grad is not None}
        norm = self.clip()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.plan.mathematics.optimizer, step)
        self.optimizer.step()
        self.after_update(step)
        return StepRecord(
            loss=float(total) / tokens,
            tokens=tokens,
            grad_norm=norm,
            microbatch_losses=losses,
            samples=samples,
            layers=range(self.plan.model.layers),
        )

    def gradients(self) -> Mapping[str, Sequence[Shard]]:
        """Return the summed gradients."""
        return {name: [self.shard(name, value)] for name, value in self.kept.items()}

    def parameters(self) -> Mapping[str, Sequence[Shard]]:
        """Return the parameters."""
        return {name: [self.shard(name, value.detach())] for name, value in self._named()}

    def shard(self, name: str, tensor: torch.Tensor) -> Shard:
        """Return a whole tensor as a shard; rank 0 answers for it."""
        shape = tuple(tensor.shape)
        return Shard(
            name=name,
            global_shape=shape,
            offset=(0,) * len(shape),
            tensor=tensor,
            primary=self.rank == 0,
        )

    def clip(self) -> float:
        """Clip by the global norm; return it."""
        limit = self.plan.mathematics.optimizer.clip_norm
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if limit is not None and norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / norm)
        return norm

    def after_reduction(self) -> None:
        """Do nothing; broken engines do."""

    def after_update(self, step: int) -> None:
        """Do nothing; broken engines do."""

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.model.named_parameters())


class Rounding(Toy):
    """Round summed gradients to a coarser dtype, as a reduction in that dtype would."""

    dtype = torch.bfloat16

    def after_reduction(self) -> None:
        """Round."""
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.to(self.dtype))


class RoundingTo32(Rounding):
    """Reduce in float32, whatever the precision of the run."""

    dtype = torch.float32


class RoundingBelow64(Rounding):
    """Reduce in bfloat16 unless the run is in float64: a proof in float64 alone sees nothing."""

    def after_reduction(self) -> None:
        """Round, unless in float64."""
        if next(self.model.parameters()).dtype != torch.float64:
            super().after_reduction()


class LossIn32(Toy):
    """Report a loss that went through float32."""

    def step(self, batch: ProofBatch, step: int) -> StepRecord:
        """Round the loss of the batch."""
        record = super().step(batch, step)
        return replace(record, loss=float(torch.tensor(record.loss, dtype=torch.float32)))


class MicrobatchLossIn32(Toy):
    """Report losses of microbatches that went through float32."""

    def step(self, batch: ProofBatch, step: int) -> StepRecord:
        """Round the losses of the microbatches."""
        record = super().step(batch, step)
        rounded = {
            slot: (float(torch.tensor(value, dtype=torch.float32)), count)
            for slot, (value, count) in record.microbatch_losses.items()
        }
        return replace(record, microbatch_losses=rounded)


class Miscounted(Toy):
    """Report the right losses beside a wrong number of tokens."""

    def step(self, batch: ProofBatch, step: int) -> StepRecord:
        """Count one token too many in each microbatch."""
        record = super().step(batch, step)
        counts = {slot: (value, n + 1) for slot, (value, n) in record.microbatch_losses.items()}
        return replace(record, microbatch_losses=counts)


class NormIn32(Toy):
    """Add up the gradient norm in float32."""

    def clip(self) -> float:
        """Clip by the right norm; report the rounded one."""
        return float(torch.tensor(super().clip(), dtype=torch.float32))


class UpdateRounded(Toy):
    """Keep a vector of parameters to nine digits."""

    def after_update(self, step: int) -> None:
        """Round the final norm."""
        weight = self.model.norm.weight.data
        weight.copy_((weight * 1e9).round() / 1e9)


class NobodyAnswers(Toy):
    """Hold the final norm without a primary holder."""

    def shard(self, name: str, tensor: torch.Tensor) -> Shard:
        """Give up the final norm."""
        shard = super().shard(name, tensor)
        return replace(shard, primary=False) if name == "norm.weight" else shard


class EveryoneAnswers(Toy):
    """Call every copy the primary one."""

    def shard(self, name: str, tensor: torch.Tensor) -> Shard:
        """Answer on every rank."""
        return replace(super().shard(name, tensor), primary=True)


class HalfIsMissing(Toy):
    """Lose the second half of every embedding that it tells of."""

    def shard(self, name: str, tensor: torch.Tensor) -> Shard:
        """Cut the embedding."""
        shard = super().shard(name, tensor)
        return replace(shard, tensor=tensor[: len(tensor) // 2]) if "embed" in name else shard


class TooLarge(Toy):
    """Tell of a vocabulary with its padding."""

    def shard(self, name: str, tensor: torch.Tensor) -> Shard:
        """Pad the embedding."""
        shard = super().shard(name, tensor)
        padded = torch.cat((tensor, tensor[:1]))
        return replace(shard, tensor=padded) if "embed" in name else shard


class Drifting(Toy):
    """Let the copy of rank 1 be off by one unit in the last place."""

    def after_update(self, step: int) -> None:
        """Drift."""
        weight = self.model.norm.weight.data
        if self.rank == 1:
            weight.copy_(torch.nextafter(weight, weight + 1))


class ClippedByTorch(Toy):
    """Clip as torch does: by the norm + 1e-6."""

    def clip(self) -> float:
        """Clip."""
        limit = self.plan.mathematics.optimizer.clip_norm
        assert limit is not None
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))


class NotClipped(Toy):
    """Measure the norm and leave the gradients as they are."""

    def clip(self) -> float:
        """Measure."""
        return float(torch.nn.utils.get_total_norm(list(self.kept.values())))


class Forgetful(Toy):
    """Lose the optimizer's moments after every step."""

    def after_update(self, step: int) -> None:
        """Forget."""
        self.optimizer.state.clear()


class NotFinite(Toy):
    """Overflow in one gradient."""

    def after_reduction(self) -> None:
        """Overflow."""
        assert self.model.norm.weight.grad is not None
        self.model.norm.weight.grad[0] = float("nan")


class Silent(Toy):
    """Zero one gradient on one rank."""

    def after_reduction(self) -> None:
        """Zero."""
        if self.rank == 1:
            assert self.model.norm.weight.grad is not None
            self.model.norm.weight.grad.zero_()


NOT_A_FUNCTION = 3
