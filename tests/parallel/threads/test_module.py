"""Any module on threads equals the full batch in float64, however the batch is cut."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.core.event import EventList
from echelon.cost.bytes.threads import (
    THREADS_AXIS,
    ByRows,
    ThreadedPass,
    ThreadedStep,
    replica_rows,
    step_bytes,
)
from echelon.parallel.threads.copies import state_of
from tests.parallel.threads.modules import F64, LIMIT, MODELS, both, furthest, gradients


@pytest.mark.system("S05")
@pytest.mark.parametrize("rows", [8, 7, 3, 1])
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_replicas_equal_the_full_batch(name: str, replicas: int, rows: int) -> None:
    """S05: even and uneven batches, and fewer rows than replicas; a mean and a sum as the loss."""
    model, alone, batch = both(name, rows)
    threaded, output_of = ec.threaded(model, replicas=replicas), MODELS[name][2]
    for reduce in (torch.mean, torch.sum):
        ours, theirs = output_of(threaded(**batch)), output_of(alone(**batch))
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= LIMIT
        for out, one in ((ours, model), (theirs, alone)):
            one.zero_grad()
            reduce(out.square()).backward()
        assert furthest(gradients(model), gradients(alone)) <= LIMIT
    threaded.close()


@pytest.mark.system("S05")
def test_training_stays_the_same_over_steps_and_passes() -> None:
    """S05: an optimizer over own parameters, and two microbatches that replicate once."""
    model, alone, _ = both("mlp", 1)
    events = EventList()
    threaded = ec.threaded(model, replicas=2, events=events)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, alone)]
    for _ in range(3):
        events.events.clear()
        parts = [torch.randn(6, 5, dtype=F64) for _ in range(2)]
        with threaded.step():
            for part in parts:
                threaded(part).square().sum().backward()
        for part in parts:
            alone(part).square().sum().backward()
        state = sum(one.nbytes for one in state_of(model))
        assert [one.bytes for one in events.events if one.kind == "replicate"] == [state, 0]
        assert threaded.sent["replicate"] == state
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert furthest(list(model.parameters()), list(alone.parameters())) <= LIMIT


@pytest.mark.system("S05")
@pytest.mark.parametrize("rows", [8, 5, 1])
def test_bytes_through_the_primary_are_those_of_the_formulas(rows: int) -> None:
    """S05: every term, of even and uneven batches: of events, of `sent` and of `step_bytes`."""
    model, _, _ = both("tied", 1)
    events = EventList()
    threaded = ec.threaded(model, replicas=4, events=events)
    out = threaded(torch.randint(0, 11, (rows, 4)))
    out["logits"].sum().backward()
    active = len(replica_rows(rows, 4))
    one = ThreadedPass(
        rows=rows,
        inputs=ByRows(cut=rows * 4 * 8),
        outputs=ByRows(cut=rows * 4 * 11 * 8 + rows * 8),
        seeds=ByRows(cut=rows * 4 * 11 * 8),
        gradients=sum(one.nbytes for one in model.parameters()),
    )
    state = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    terms = step_bytes(ThreadedStep(replicas=4, state=state, passes=[one]))
    assert threaded.sent == {term.name: term.bytes for term in terms}
    assert events.bytes_by_axis() == {THREADS_AXIS: sum(term.bytes for term in terms)}
    assert threaded.sent["gradients"] == (active - 1) * one.gradients
    assert threaded.sent["replicate"] == (active - 1) * (one.gradients + 6 * 8)


def test_bytes_of_arguments_with_gradients_and_of_those_that_all_get() -> None:
    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * shift, x.sum()

    threaded = ec.threaded(Shifted(), replicas=2, whole=["shift"])
    x = torch.randn(5, 3, dtype=F64, requires_grad=True)
    shift = torch.randn(3, dtype=F64, requires_grad=True)
    y, total = threaded(x, shift)
    assert total.shape == (2,)
    (y.sum() + total.sum()).backward()
    assert x.grad is not None
    assert shift.grad is not None
    assert (x.grad - (1 + shift)).abs().max() <= LIMIT
    assert (shift.grad - x.sum(0)).abs().max() <= LIMIT
    moved, numbers = ByRows(cut=5 * 24, each=24), ByRows(cut=5 * 24, each=8)
    one = ThreadedPass(rows=5, inputs=moved, outputs=numbers, seeds=numbers, input_gradients=moved)
    terms = step_bytes(ThreadedStep(replicas=2, state=0, passes=[one]))
    assert threaded.sent == {term.name: term.bytes for term in terms}


@pytest.mark.system("S05")
def test_hooks_of_parameters_see_the_sum_once() -> None:
    """S05: golden 004-09: gradients of replicas are added, never averaged."""
    model, alone, batch = both("mlp", 6)
    seen: list[torch.Tensor] = []
    ended: list[str] = []
    weight = next(model.parameters())
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    weight.register_post_accumulate_grad_hook(lambda _: ended.append("weight"))
    ec.threaded(model, replicas=3)(**batch).sum().backward()
    alone(**batch).sum().backward()
    assert len(seen) == len(ended) == 1
    assert furthest(seen, gradients(alone)[:1]) <= LIMIT


def test_frozen_parameters_and_parameters_that_are_not_used() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle, self.frozen = (nn.Linear(5, 5) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.used(x))

    model = Part().to(F64)
    ec.threaded(model, replicas=2)(torch.randn(4, 5, dtype=F64)).sum().backward()
    assert model.used.weight.grad is not None
    assert model.idle.weight.grad is None
    assert model.frozen.weight.grad is None
    model.requires_grad_(False)
    out = ec.threaded(model, replicas=2)(torch.randn(4, 5, dtype=F64))
    assert not out.requires_grad


def test_what_is_trained_and_is_no_parameter_gets_its_gradient() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = [torch.tensor(2.0, dtype=F64, requires_grad=True)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.alpha[0] * x

    model, x = Loose(), torch.randn(6, 2, dtype=F64)
    ec.threaded(model, replicas=3)(x).sum().backward()
    assert model.alpha[0].grad is not None
    assert (model.alpha[0].grad - x.sum()).abs() <= LIMIT


def test_gradients_are_asked_for_in_every_way_of_autograd() -> None:
    model, alone, batch = both("mlp", 5)
    threaded = ec.threaded(model, replicas=2)
    found = torch.autograd.grad(threaded(**batch).sum(), list(model.parameters()))
    wanted = torch.autograd.grad(alone(**batch).sum(), list(alone.parameters()))
    assert furthest(list(found), list(wanted)) <= LIMIT
    assert all(one.grad is None for one in model.parameters())
    loss = threaded(**batch).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert furthest(gradients(model), [2 * one for one in wanted]) <= LIMIT
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()
    # Two passes before one backward pass: each has tensors of its own.
    model.zero_grad()
    (threaded(**batch).sum() + threaded(**batch).sum()).backward()
    assert furthest(gradients(model), [2 * one for one in wanted]) <= LIMIT
    squares = threaded(**batch).square().sum()
    first, *_ = torch.autograd.grad(squares, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_gradients_and_evaluation() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.BatchNorm1d(5)).to(F64)
    threaded = ec.threaded(model, replicas=2)
    x = torch.randn(6, 5, dtype=F64)
    threaded.eval()
    assert not model[1].training
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = threaded(x)
            assert not out.requires_grad
            assert torch.equal(out, torch.cat([model(rows) for rows in x.chunk(2)]))
    threaded.train()
    assert model[1].training
    assert not torch.equal(threaded(x), threaded(x))


def test_autocast_is_that_of_the_caller() -> None:
    model, _, _ = both("mlp", 1)
    model.float()
    threaded = ec.threaded(model, replicas=2)
    x = torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out = threaded(x)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, model(x))
    out.float().sum().backward()
    assert gradients(model)[0].dtype == torch.float32
    assert threaded(x).dtype == torch.float32


def test_buffers_of_the_first_replica_stay_and_others_are_lost() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inside", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))
            self.inside: torch.Tensor
            self.replaced: torch.Tensor
            self.passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inside += len(x)
            self.replaced = self.replaced + len(x)
            self.passes += 1
            return x

    model = Counts()
    threaded = ec.threaded(model, replicas=2)
    for _ in range(2):
        threaded(torch.zeros(5, 1))
    assert model.inside == model.replaced == 2 * 3
    assert model.passes == 0
    norm = nn.BatchNorm1d(3, dtype=F64)
    x = torch.randn(6, 3, dtype=F64)
    ec.threaded(norm, replicas=2)(x)
    assert norm.running_mean is not None
    assert (norm.running_mean - 0.1 * x[:3].mean(0)).abs().max() <= LIMIT


def test_what_a_replica_raises_names_it_and_the_next_pass_works() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x < 0).any():
                raise ValueError("less than nothing")
            return x

    threaded = ec.threaded(Picky(), replicas=3)
    with pytest.raises(ValueError, match="less than nothing") as caught:
        threaded(torch.tensor([1.0, 1.0, -1.0]))
    assert caught.value.__notes__ == ["in replica 2 of 3, on cpu"]
    assert caught.traceback[-1].name == "forward"
    assert threaded(torch.ones(3)).tolist() == [1, 1, 1]


def test_modules_of_many_kinds_are_copied() -> None:
    """Recurrent weights, parametrisations, lists of parameters, checkpoints that recompute."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(4, 4, batch_first=True)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.scales = nn.ParameterList([torch.ones(4), torch.ones(4)])
            self.by_name = nn.ParameterDict({"shift": torch.zeros(4)})

        def block(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu_(self.normed(x)) * self.scales[0] + self.by_name["shift"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.recurrent(x)[0] * self.scales[1]
            again = checkpoint(self.block, x, use_reentrant=False)
            return x + again + checkpoint(self.block, x, use_reentrant=True)

    torch.manual_seed(0)
    model = Mixed().to(F64)
    alone = copy.deepcopy(model)
    x = torch.randn(5, 3, 4, dtype=F64)
    ec.threaded(model, replicas=2)(x).square().sum().backward()
    alone(x).square().sum().backward()
    assert furthest(gradients(model), gradients(alone)) <= LIMIT


def test_arguments_may_be_changed_in_place_and_cut_along_another_dim() -> None:
    model, alone = nn.Sequential(nn.ReLU(inplace=True), nn.Softmax(0)), nn.Softmax(0)
    x = torch.randn(3, 7, dtype=F64, requires_grad=True)
    out = ec.threaded(model, replicas=4, dim=1)(x)
    out.square().sum().backward()
    found, x.grad = x.grad, None
    assert (out - alone(x.relu())).abs().max() <= LIMIT
    alone(x.relu()).square().sum().backward()
    assert found is not None
    assert x.grad is not None
    assert (found - x.grad).abs().max() <= LIMIT


def test_parameters_that_change_inside_of_a_step() -> None:
    model, _, batch = both("mlp", 4)
    threaded = ec.threaded(model, replicas=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with threaded.step():
        threaded(**batch).sum().backward()
        optimizer.step()
        with pytest.raises(ec.ConfigError) as caught:
            threaded(**batch)
    assert caught.value.rules == ("threaded-step",)
    threaded(**batch)
    with threaded.step(), pytest.raises(RuntimeError, match="not entered twice"):
        threaded.step().__enter__()


def test_a_batch_without_tensors_or_rows_is_the_first_replicas() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
            return torch.ones(1) if x is None else x

    threaded = ec.threaded(Constant(), replicas=2)
    assert threaded().tolist() == [1]
    assert threaded(torch.zeros(0, 3)).shape == (0, 3)
    assert set(threaded.sent.values()) == {0}


def test_a_copy_has_threads_of_its_own_and_closing_ends_them() -> None:
    model, _, batch = both("mlp", 4)
    threaded = ec.threaded(model, replicas=2)
    assert (threaded.replicas, next(iter(threaded.state_dict()))) == (2, "module.0.weight")
    out = threaded(**batch)
    other = copy.deepcopy(threaded)
    assert torch.equal(other(**batch), out)
    before = threading.active_count()
    threaded.close()
    other.close()
    assert threading.active_count() == before - 4
    assert torch.equal(threaded(**batch), out)
    threaded.close()
