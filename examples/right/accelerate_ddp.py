"""Accelerate over two replicas: its DDP, its gradient accumulation, its data loader.

Needs accelerate and transformers (tried with 1.15 and 5.23).
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn import functional as fn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import echelon as ec

MESH = {"dp": 2}
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

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train this replica by a loop as in Accelerate's guides, with one denominator for the loss."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES)
    model = model_of(case)
    # One step more than is run: on the last batch of a loader Accelerate always reduces.
    rows = [row for step in range(case.num_steps + 1) for row in rows_of(step)]
    loader = DataLoader(rows, SEQUENCES // MICROBATCHES // case.world_size, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = iter(loader)

    def step(_: int) -> dict[str, torch.Tensor]:
        microbatches = [next(batches) for _ in range(MICROBATCHES)]
        labels = sum((one["labels"][:, 1:] != -100).sum() for one in microbatches)
        dist.all_reduce(labels)
        total = torch.zeros((), dtype=case.dtype)
        for one in microbatches:
            with accelerator.accumulate(model):
                # DDP and Accelerate take means over replicas and microbatches: made sums.
                loss = summed_loss(model, one) * case.world_size * MICROBATCHES / labels
                accelerator.backward(loss)
                total += loss.detach() / MICROBATCHES
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
        return {"loss": total, "grad_norm": norm}

    return ec.OnRank(model=model, step=step, optimizer=optimizer)
