"""One block of experts in bf16 on one device: `python -m bench.gpu.experts`.

Echelon with grouped products (one launch for all experts) and without, beside the block of
transformers with its grouped products and eager. Forward, backward and weight gradients of one
batch; all cases take turns, a turn being some steps in a row. First the outputs and the gradients
of the input are compared: the exit is 1 where a case computes something else than the first.
`--device cpu` is a rehearsal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from bench.gpu.measure import profiled
from bench.gpu.pieces import timed
from bench.harness.catalogue import ours
from bench.harness.plans import bench_plan
from bench.harness.spec import SINGLE, Size
from echelon.core.choices.kernels import Kernels
from echelon.core.event import NoEvents
from echelon.core.model_shape import Experts
from echelon.core.parameters import parameters
from echelon.core.plan import Plan, Precision
from echelon.models.batch import TokenBatch
from echelon.models.counter_random import initial_values
from echelon.models.moe import MixtureOfExperts
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.expert import grouped_matmul
from echelon.parallel.transport.recorder import Recorder

Results = tuple[torch.Tensor, ...]
"""The output, and the gradient of the input, [N, D] both."""

Step = Callable[[], Results]

LARGEST_ERROR = 2e-2
"""What a case may be off, of the largest element: sums and products of bf16 in another order."""

TIES = 4
"""Tokens that may be off by more: two experts may be as good for them as float32 can tell."""

BLOCK = "layers.0.mlp."
SEQUENCES, TOP_K = 4, 2
BF16 = Precision(parameters="bf16", gradients="bf16", reduction="bf16", master="fp32")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table per size; exit 1 where outputs differ, 3 where torch sees no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.experts", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (cuda)")
    add(
        "--sizes",
        default="16384x2048x1408,16384x4096x14336",
        help="TOKENSxHIDDENxFFN (%(default)s)",
    )
    add("--experts", type=int, default=8, help="experts, of which a token meets 2 (%(default)s)")
    add("--steps", type=int, default=5, help="timed steps in a row (5)")
    add("--repeats", type=int, default=5, help="turns of every case; the median counts (5)")
    add("--profile", action="store_true", help="tell the longest kernels of each case, too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("not run: torch sees no CUDA device", file=sys.stderr)
        return 3
    device = torch.device(options.device)
    wrong: list[str] = []
    for text in options.sizes.split(","):
        made = dict(cases(block_plan(text, options.experts), device))
        errors = errors_of({name: case.checked for name, case in made.items()})
        print("\n".join(table(text, made, errors, options, device)), flush=True)
        if options.profile:
            print("\n".join(longest(made, device)), flush=True)
        wrong += [f"{text}, {name}" for name, error in errors.items() if error > LARGEST_ERROR]
    if wrong:
        print(f"error: other results than those of the first: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCase:
    """Hold the step that is timed, and the one whose results are compared."""

    step: Step
    checked: Step


def block_plan(text: str, num_experts: int) -> Plan:
    """The plan of one block on one rank, of TOKENSxHIDDENxFFN; ValueError for another text."""
    parts = [int(part) for part in text.split("x")]
    if len(parts) != 3 or min(parts) < 1 or parts[0] % SEQUENCES or parts[1] % 8:
        raise ValueError(
            f"{text!r} is not TOKENSxHIDDENxFFN with {SEQUENCES} | TOKENS and 8 | HIDDEN"
        )
    tokens, hidden, ffn = parts
    rest = {"layers": 1, "vocab": 64, "sequence": tokens // SEQUENCES}
    size = Size(name=text, hidden=hidden, ffn=ffn, global_sequences=SEQUENCES, **rest)
    plan = bench_plan(ours(SINGLE).settings(size))
    experts = Experts(num_experts=num_experts, top_k=TOP_K, ffn=ffn)
    model = replace(plan.model, experts=experts)
    return replace(plan, mathematics=replace(plan.mathematics, model=model, precision=BF16))


def cases(plan: Plan, device: torch.device) -> Iterator[tuple[str, BlockCase]]:
    """Yield each case by its name; all have the same weights and tokens."""
    generator = torch.Generator(device).manual_seed(1)
    sequences, length = plan.mathematics.global_sequences, plan.mathematics.sequence_length
    shape = (sequences * length, plan.model.hidden)
    x, dy = (
        torch.randn(shape, generator=generator, device=device).to(torch.bfloat16) for _ in range(2)
    )
    ours = _echelon(plan, x, dy)
    if grouped_matmul.has_grouped_kernel(x):
        fused = replace(plan.layout, kernels=Kernels(provider="triton", fused=("swiglu",)))
        fastest = _echelon(replace(plan, layout=fused), x, dy)
        yield "Echelon, grouped products", _alike(fastest)
        yield "Echelon, one expert after the other", _alike(_one_by_one(fastest))
        yield "Echelon, grouped products, plain SwiGLU", _alike(ours)
    else:
        yield "Echelon, one expert after the other, plain SwiGLU", _alike(ours)
    try:
        for way in ("grouped_mm", "eager"):
            yield f"transformers Mixtral, {way}", _transformers(plan, way, x, dy)
    except ImportError:
        print("transformers is not installed", file=sys.stderr)


def _alike(step: Step) -> BlockCase:
    return BlockCase(step=step, checked=step)


def _echelon(plan: Plan, x_ND: torch.Tensor, dy_ND: torch.Tensor) -> Step:
    groups = rank_groups(plan, Recorder(0, NoEvents()))
    model = apply_plan(plan, groups, x_ND.device)
    mixture = cast(MixtureOfExperts, model.stages[0].layers["0"].mlp)
    sequences, length = plan.mathematics.global_sequences, plan.mathematics.sequence_length
    tokens_BT = torch.zeros(sequences, length, dtype=torch.int64, device=x_ND.device)
    ids_B = torch.arange(sequences, device=x_ND.device)
    batch = TokenBatch.from_rows(tokens_BT, tokens_BT, ids_B)
    balancer = model.balancer
    assert balancer is not None

    def run(x_ND: torch.Tensor) -> torch.Tensor:
        model.store.start_step()
        balancer.start_step(1.0)
        model.store.start_backward(last=False)
        y_ND = mixture(x_ND, batch)
        y_ND.backward(dy_ND)
        model.store.run_deferred()
        return y_ND

    return partial(_stepped, run, x_ND)


def _stepped(run: Callable[[torch.Tensor], torch.Tensor], x_ND: torch.Tensor) -> Results:
    x_ND = x_ND.detach().requires_grad_()
    y_ND = run(x_ND)
    assert x_ND.grad is not None
    return y_ND.detach(), x_ND.grad


def _one_by_one(step: Step) -> Step:
    def without() -> Results:
        with _no_kernel():
            return step()

    return without


@contextmanager
def _no_kernel() -> Iterator[None]:
    kept = grouped_matmul.has_grouped_kernel
    grouped_matmul.has_grouped_kernel = lambda x: False
    try:
        yield
    finally:
        grouped_matmul.has_grouped_kernel = kept


def _transformers(plan: Plan, way: str, x_ND: torch.Tensor, dy_ND: torch.Tensor) -> BlockCase:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    experts = plan.model.experts
    assert experts is not None
    sizes: dict[str, Any] = {
        "hidden_size": plan.model.hidden,
        "intermediate_size": experts.ffn,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "experts_implementation": way,
    }
    with x_ND.device:
        block: Any = MixtralSparseMoeBlock(MixtralConfig(**sizes)).train()
    with torch.no_grad():
        for spec in parameters(plan.model):
            if not spec.name.startswith(BLOCK):
                continue
            made = torch.empty(spec.shape, device=x_ND.device)
            values = initial_values(plan.model, spec, plan.mathematics.seed, into=made)
            part = spec.name.split(".")[-2]
            if spec.expert is None:
                block.gate.weight.copy_(values)
            elif part == "down":
                block.experts.down_proj[spec.expert].copy_(values)
            else:
                block.experts.gate_up_proj[spec.expert].chunk(2)[part == "up"].copy_(values)
    block.to(x_ND.device, torch.bfloat16)

    def run(x_ND: torch.Tensor) -> torch.Tensor:
        block.zero_grad()
        y_ND: torch.Tensor = block(x_ND[None])[0]
        y_ND.backward(dy_ND)
        return y_ND

    step = partial(_stepped, run, x_ND)

    def checked() -> Results:
        # In bf16 its router takes other experts for tokens for which two are almost as good.
        widened = block.gate.float().register_forward_pre_hook(lambda _, given: given[0].float())
        try:
            return step()
        finally:
            widened.remove()
            block.gate.to(torch.bfloat16)

    return BlockCase(step=step, checked=checked)


def errors_of(steps: dict[str, Step]) -> dict[str, float]:
    """Return how far the results of each step are from those of the first.

    Of the largest element of a result, but for those of a few tokens (`TIES`).
    """
    first, *others = steps.items()
    wanted = [one.float() for one in first[1]()]
    errors = {first[0]: 0.0}
    for name, step in others:
        found = zip(step(), wanted, strict=True)
        errors[name] = max(_error(got.float().view_as(one), one) for got, one in found)
    return errors


def _error(got_ND: torch.Tensor, wanted_ND: torch.Tensor) -> float:
    off_N = (got_ND - wanted_ND).abs().amax(1).nan_to_num(torch.inf)
    return float(off_N.sort().values[-1 - TIES] / wanted_ND.abs().max())


def table(
    size: str,
    made: dict[str, BlockCase],
    errors: dict[str, float],
    options: argparse.Namespace,
    device: torch.device,
) -> list[str]:
    """Return the lines of a table: medians over turns, and how far results lie from the first."""
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.repeats):
        for name, case in made.items():
            times[name].append(timed(case.step, options.steps, device))
    lines = [f"{size}, bf16, {options.experts} experts", ""]
    lines += ["| case | ms | spread | of the first | error |", "|---|---|---|---|---|"]
    shortest = statistics.median(next(iter(times.values())))
    for name, taken in times.items():
        middle = statistics.median(taken)
        spread, ratio = (max(taken) - min(taken)) / middle, middle / shortest
        cells = (f"{middle * 1e3:.2f}", f"{spread:.0%}", f"{ratio:.3f}", f"{errors[name]:.1e}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def longest(made: dict[str, BlockCase], device: torch.device) -> Iterator[str]:
    """Yield a table of the longest kernels of each case."""
    for name, case in made.items():
        launches, kernels = profiled(case.step, device.type)
        yield f"\n{name}: {launches} launches\n\n| us | calls | kernel |\n|---|---|---|"
        for kernel, calls, seconds in kernels:
            yield f"| {float(str(seconds)) * 1e6:.0f} | {calls} | `{str(kernel)[:110]}` |"


if __name__ == "__main__":
    sys.exit(main())
