"""DeepSpeed ZeRO over two replicas: two microbatches a step, clipped by the engine.

Stage 3 as it is; stages 1 and 2 by `echelon prove --subject FILE:on_rank_zero1` and so on.

Needs deepspeed and transformers (tried with 0.19 and 5.23), and its C++ operators compiled.
"""

import logging
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as fn
from transformers import LlamaConfig, LlamaForCausalLM

import echelon as ec

# DeepSpeed looks for an accelerator, compiles its operators with ninja, and talks, on import.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix).parent / "torch_extensions"))
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
logging.disable(logging.INFO)

MESH = {"dp": 2}
FLOAT64 = False  # its optimizers keep fp32
VOCAB, LENGTH, SEQUENCES, MICROBATCHES = 48, 16, 8, 2
CLIP_NORM, RATE = 0.5, 1e-3


def model_of(case: ec.VerifyCase) -> LlamaForCausalLM:
    """Return a small Llama with the initial values that every rank and one device share."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(case.seed)
    return LlamaForCausalLM(config).to(case.dtype)


def rows_of(step: int) -> list[dict[str, torch.Tensor]]:
    """Return the sequences of one step; they have different numbers of labels that count."""
    made = torch.Generator().manual_seed(1000 + step)
    tokens_BT = torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=made)
    labels_BT = tokens_BT.clone()
    for row in range(SEQUENCES):
        labels_BT[row, 4 + row :] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens_BT, labels_BT, strict=True)]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of sequences."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def summed_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the token losses, in the precision of the weights."""
    logits_BTV = model(input_ids=batch["input_ids"]).logits[:, :-1]
    labels_BT = batch["labels"][:, 1:]
    return fn.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")


def num_labels(rows: list[dict[str, torch.Tensor]]) -> int:
    """Return how many labels count."""
    return sum(int((row["labels"][1:] != -100).sum()) for row in rows)


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train on one device: the mean over all labels of the batch."""
    model = model_of(case)

    def loss(step: int) -> torch.Tensor:
        rows = rows_of(step)
        return summed_loss(model, collate(rows)) / num_labels(rows)

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Share out state, gradients and weights."""
    return train(case, stage=3)


def on_rank_zero2(case: ec.VerifyCase) -> ec.OnRank:
    """Share out state and gradients."""
    return train(case, stage=2)


def on_rank_zero1(case: ec.VerifyCase) -> ec.OnRank:
    """Share out state."""
    return train(case, stage=1)


def train(case: ec.VerifyCase, stage: int) -> ec.OnRank:
    """Train this replica by the engine's forward, backward and step."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = model_of(case)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES // MICROBATCHES // case.world_size,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": stage},
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
        labels = num_labels(rows)
        mine = rows[case.rank :: case.world_size]
        total = torch.zeros((), dtype=case.dtype)
        for microbatch in range(MICROBATCHES):
            part = collate(mine[microbatch::MICROBATCHES])
            # The engine takes means over microbatches and replicas: times both, they are sums.
            loss = summed_loss(engine, part) * case.world_size * MICROBATCHES / labels
            engine.backward(loss)
            engine.step()
            total += loss.detach() / MICROBATCHES
        return {"loss": total, "grad_norm": engine.get_global_grad_norm()}

    return ec.OnRank(model=engine, step=step, engine=engine)
