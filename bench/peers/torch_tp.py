"""torch DTensor tensor parallelism over the Hugging Face Llama, with or without replicas.

Variants: "plain" is the per-linear plan of torch's tutorial; "shared" makes q, k, v (and gate, up)
read one DTensor input, so that their input gradients are all-reduced once, not once per linear.
Sequence parallelism follows the mode and always shares inputs. Replicas use the FSDP2-based
`replicate`: plain DDP silently stops training on DTensor parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.harness.data import rank_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import adamw, cross_entropy, join, llama

Plan = dict[str, ParallelStyle]


def layer_plan(*, sequence_parallel: bool, shared: bool) -> Plan:
    """Return how the modules of one decoder layer are split."""
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    plan: Plan = {name: ColwiseParallel() for name in columns}
    output = Shard(1) if sequence_parallel else Replicate()
    plan |= {name: RowwiseParallel(output_layouts=output) for name in rows}
    if not (sequence_parallel or shared):
        return plan
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": output},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    )
    plan["mlp"] = PrepareModuleInput(input_layouts=(output,), desired_input_layouts=(Replicate(),))
    if sequence_parallel:
        plan["input_layernorm"] = SequenceParallel()
        plan["post_attention_layernorm"] = SequenceParallel()
    return plan


def split(settings: Settings, model: Any, mesh: DeviceMesh, *, split_loss: bool) -> None:
    """Split a whole model over the tensor mesh, in place."""
    sequence_parallel = settings.mode.sequence_parallel
    residual = Shard(1) if sequence_parallel else Replicate()
    top: Plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "lm_head": ColwiseParallel(
            input_layouts=residual,
            output_layouts=Shard(-1) if split_loss else Replicate(),
            use_local_output=not split_loss,
        ),
    }
    if sequence_parallel:
        top["model.norm"] = SequenceParallel()
    parallelize_module(model, mesh, top)
    shared = settings.variant == "shared"
    for layer in model.model.layers:
        parallelize_module(
            layer, mesh, layer_plan(sequence_parallel=sequence_parallel, shared=shared)
        )


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank of dp x tp."""
    join(settings)
    mode = settings.mode
    model = llama(settings)
    dp_rank = dist.get_rank() // mode.tp
    split_loss = mode.dp == 1
    if split_loss:
        split(settings, model, init_device_mesh("cpu", (mode.tp,)), split_loss=True)
    else:
        mesh = init_device_mesh("cpu", (mode.dp, mode.tp), mesh_dim_names=("dp", "tp"))
        split(settings, model, mesh["tp"], split_loss=False)
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for layer in model.model.layers:
            replicate(layer, mesh=mesh["dp"])
        replicate(model, mesh=mesh["dp"])
    optimizer = adamw(settings, model.parameters())
    positions = torch.arange(settings.size.sequence).unsqueeze(0)

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = rank_batch(settings, number, dp_rank, mode.dp)
        if split_loss:
            with loss_parallel():
                logits = model(input_ids=inputs, position_ids=positions).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.reshape(-1))
                loss.backward()
            loss = loss.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        else:
            loss = cross_entropy(model(input_ids=inputs, position_ids=positions).logits, labels)
            loss.backward()
        optimizer.step()
        return loss.item()

    return step
