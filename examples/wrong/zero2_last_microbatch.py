"""DeepSpeed ZeRO 2 and accumulation by hand: only the last microbatch is trained on.

What you would have seen: the right loss, a gradient norm that is too small, worse curves with ZeRO
2 than with ZeRO 3; nothing in any log says that microbatches are thrown away.
Public issue: https://github.com/deepspeedai/DeepSpeed/issues/7718 (open), explained in
https://github.com/allenai/open-instruct/pull/1498.
Cause: with `gradient_accumulation_steps` 1 every backward is a boundary, at which stage 2 takes
what has been accumulated and starts anew; a loop that accumulates by itself steps on the last
piece. It is so in DeepSpeed 0.19.
Mended here: `set_gradient_accumulation_boundary` says which backward is the last.
Needs deepspeed and transformers (tried with 0.19 and 5.23), and its C++ operators compiled.
"""

import sys
from pathlib import Path

import torch

import echelon as ec

sys.path.append(str(Path(__file__).resolve().parent.parent / "right"))

from deepspeed_zero import (
    CLIP_NORM,
    MICROBATCHES,
    RATE,
    SEQUENCES,
    collate,
    model_of,
    num_labels,
    one_device,
    rows_of,
    summed_loss,
)

MESH = {"dp": 2}
FLOAT64 = False  # its optimizers keep fp32

__all__ = ["one_device"]


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Call backward for each microbatch, then step once."""
    return train(case, mark_last=False)


def on_rank_fixed(case: ec.VerifyCase) -> ec.OnRank:
    """Say which backward is the last."""
    return train(case, mark_last=True)


def train(case: ec.VerifyCase, mark_last: bool) -> ec.OnRank:
    """Train this replica; the engine is told of one microbatch a step."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = model_of(case)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES // case.world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01),
        config=config,
    )

    def step(number: int) -> dict[str, torch.Tensor | float | None]:
        rows = rows_of(number)
        mine = rows[case.rank :: case.world_size]
        total = torch.zeros((), dtype=case.dtype)
        for microbatch in range(MICROBATCHES):
            if mark_last:
                engine.set_gradient_accumulation_boundary(microbatch == MICROBATCHES - 1)
            part = collate(mine[microbatch::MICROBATCHES])
            # The engine takes the mean over replicas: times their number, it is a sum.
            loss = summed_loss(engine, part) * case.world_size / num_labels(rows)
            engine.backward(loss)
            total += loss.detach()
        engine.step()
        return {"loss": total, "grad_norm": engine.get_global_grad_norm()}

    return ec.OnRank(model=engine, step=step, engine=engine)
