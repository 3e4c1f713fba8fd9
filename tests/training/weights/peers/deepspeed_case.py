"""DeepSpeed saves after three steps and goes on; or goes on from a universal folder.

`deepspeed_case.py save STAGE FOLDER [bf16]` and `deepspeed_case.py universal STAGE FOLDER`, under
torch.distributed.run. What it computes lies in FOLDER/computed.pt: logits, and losses of steps.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.training.weights.peers.model import RATE, asked, llama, mean_loss, rank, tokens

STEPS = 3


def _deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix).parent / "torch_extensions")
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    logging.disable(logging.INFO)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def _engine(stage: int, *, universal: bool, bf16: bool) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "checkpoint": {"load_universal": universal},
    }
    if bf16:
        config["bf16"] = {"enabled": True}
    model = llama()
    engine, *_ = _deepspeed().initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def _losses(engine: Any, first: int, count: int) -> list[float]:
    found: list[float] = []
    for step in range(first, first + count):
        ids = tokens(step, rank())
        loss = mean_loss(engine(input_ids=ids[:, :-1]).logits, ids[:, 1:])
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        found.append(whole.item() / dist.get_world_size())
    return found


def main() -> None:
    """Save or load, and write what was computed."""
    action, stage, folder, *more = sys.argv[1:]
    universal = action == "universal"
    engine = _engine(int(stage), universal=universal, bf16="bf16" in more)
    if universal:
        engine.load_checkpoint(folder)
    else:
        _losses(engine, 0, STEPS)
        engine.save_checkpoint(folder)
    with torch.no_grad():
        logits = engine(input_ids=asked()).logits.float().clone()
    after = _losses(engine, STEPS, 2)
    if rank() == 0:
        torch.save({"logits": logits, "losses": after}, f"{folder}/computed.pt")
        print(json.dumps({"losses": after}))
    dist.barrier()


if __name__ == "__main__":
    main()
