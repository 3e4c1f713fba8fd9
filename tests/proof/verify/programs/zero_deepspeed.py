"""DeepSpeed, ZeRO stages 1 to 3, its own clipping."""

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix).parent / "torch_extensions")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

import net
from net import adamw, batch, built, loss_of

import echelon as ec

MESH = {"dp": 2}
FLOAT64 = False
STAGE, CLIP = 2, 0.5


def one_device(case):
    made = net.one_device(case)
    return ec.OneDevice(model=made.model, loss=made.loss, optimizer=made.optimizer, clip_norm=CLIP)


def on_rank(case):
    os.environ["LOCAL_SIZE"] = str(case.world_size)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = built(case)
    dp = case.degrees["dp"]
    config = {
        "train_micro_batch_size_per_gpu": net.ROWS // dp,
        "train_batch_size": net.ROWS,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIP,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config
    )

    def step(number):
        ids, labels = (rows.chunk(dp)[case.mesh["dp"]] for rows in batch(number))
        loss = loss_of(engine(ids), labels)
        engine.backward(loss)
        engine.step()
        return loss

    return ec.OnRank(model=engine, step=step)
