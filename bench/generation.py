"""Greedy generation beside transformers, both with a cache: `python -m bench generation`.

The same Llama with the same random weights in fp32, one thread a rank: transformers in one process,
ours in that process too, and ours on two tensor ranks. Cases take turns; a turn reads prompts of 32
tokens and writes 64 after each. All must write the same tokens. Exit 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from echelon.config.generation import generation_plan
from echelon.core.event import NoEvents
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.cost.bytes.generate import KindCacheSizes, cache_size
from echelon.inference.cache import CachedSequence, KindCaches
from echelon.inference.generator import Generator, Writing
from echelon.inference.operations import CacheOperations
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.layout.stage import part_of
from echelon.models.decoder import Decoder
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.transport.recorder import Recorder
from echelon.training.inference import empty_decoder, put_off_biases, weight_shards

PROMPT, COUNT = 32, 64  # tokens
BESIDE_TRANSFORMERS = {1: 1.0, 2: 1.5}
"""The least tokens per second by ranks, as multiples of those of transformers."""

_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.": "self_attn.",
}


def _llama(layers: int, hidden: int, ffn: int, vocab: int, heads: int, kv_heads: int) -> ModelShape:
    sizes = {"layers": layers, "hidden": hidden, "ffn": ffn, "vocab": vocab, "heads": heads}
    head_dim = hidden // heads
    return ModelShape(
        name="llama", kv_heads=kv_heads, head_dim=head_dim, max_positions=1024, **sizes
    )


SIZES = {
    "tiny": _llama(4, 128, 352, 512, 4, 2),
    "34m": _llama(8, 512, 1376, 8192, 8, 8),
    "150m": _llama(8, 1024, 2816, 16384, 16, 4),
}


def weights_of(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return random weights that make unlike texts."""
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.ones(spec.shape)
        if spec.initial == "ones"
        else torch.randn(spec.shape, generator=generator) * (3.0 / spec.shape[-1]) ** 0.5
        for spec in parameters(shape)
    }


def prompts_of(shape: ModelShape, batch: int) -> list[list[int]]:
    """Return prompts of one length, which transformers wants."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocab, (batch, PROMPT), generator=generator).tolist()


class Ours:
    """One rank of ours, ready to write."""

    def __init__(self, plan: Plan, context: RankContext, batch: int) -> None:
        """Make the rank's part of the model."""
        self.plan, self._prompts = plan, prompts_of(plan.model, batch)
        self._groups = rank_groups(plan, Recorder(context.rank, NoEvents(), context.progress))
        part = part_of(plan, context.rank)
        self._layers = part.blocks
        self.decoder: Decoder = empty_decoder(
            plan, part, self._groups, torch.float32, context.device
        )
        whole = weights_of(plan.model)
        for name, shards in weight_shards(plan, part, self.decoder, self._groups).items():
            for one in shards:
                place = zip(one.offset, one.tensor.shape, strict=True)
                one.tensor.copy_(whole[name][tuple(slice(at, at + n) for at, n in place)])
        put_off_biases(self.decoder)

    def write(self) -> tuple[list[list[int]], float]:
        """Return what is written after each prompt, and the seconds that it took."""
        operations = self.decoder.operations
        assert isinstance(operations, CacheOperations)
        start = time.perf_counter()
        lengths = [len(one) for one in self._prompts]
        size = cache_size(self.plan, len(self._layers), lengths, max_tokens=COUNT, block_tokens=16)
        kinds = KindCacheSizes(sizes=(size,), blocks=(self._layers,), windows=(None,))
        operations.caches = KindCaches(kinds, torch.float32, torch.device("cpu"))
        sequences = [
            CachedSequence(number=number, tokens=list(one), prompt_tokens=PROMPT)
            for number, one in enumerate(self._prompts)
        ]
        Generator(self.plan, self.decoder, self._groups).write(sequences, Writing(max_tokens=COUNT))
        return [one.written for one in sequences], time.perf_counter() - start


def on_rank(context: RankContext, argument: Mapping[str, Any]) -> tuple[list[list[int]], float]:
    """Write once a few times on a rank; return the tokens, and the median of the seconds."""
    torch.set_num_threads(1)
    ours = Ours(Plan.from_json(argument["plan"]), context, argument["batch"])
    ours.write()
    found = [ours.write() for _ in range(argument["turns"])]
    return found[0][0], statistics.median(seconds for _, seconds in found)


def transformers_model(shape: ModelShape) -> Any:
    """Return the model of transformers with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({_their_name(name): x for name, x in weights_of(shape).items()})
    return model


def _their_name(name: str) -> str:
    ends = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in ends:
        return ends[name]
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    module, _, last = name.rpartition(".")
    suffix = "" if module.endswith("layernorm") else "_proj"
    return f"model.{module}{suffix}.{last}"


def _transformers_turn(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False
        )
    return found[:, PROMPT:].tolist(), time.perf_counter() - start


def measure(name: str, batch: int, rounds: int, pool: RankPool) -> dict[str, float]:
    """Return tokens per second of each case of one size."""
    shape = SIZES[name]
    plans = {ranks: _plan(shape, ranks) for ranks in (1, 2)}
    theirs, prompts = transformers_model(shape), prompts_of(shape, batch)
    expected = _transformers_turn(theirs, prompts)[0]
    seconds: dict[str, list[float]] = {"transformers": [], "1 rank": [], "2 ranks": []}
    for _ in range(rounds):
        seconds["transformers"].append(
            statistics.median(_transformers_turn(theirs, prompts)[1] for _ in range(2))
        )
        for ranks, plan in plans.items():
            argument = {"plan": plan.to_json(), "batch": batch, "turns": 2}
            found = pool.run("bench.generation:on_rank", argument, ranks)
            for written, _ in found:
                if written != expected:
                    print(f"{name} x {batch}: {ranks} ranks write other tokens", file=sys.stderr)
            label = "1 rank" if ranks == 1 else f"{ranks} ranks"
            seconds[label].append(max(one for _, one in found))
    return {case: batch * COUNT / statistics.median(all_s) for case, all_s in seconds.items()}


def _plan(shape: ModelShape, ranks: int) -> Plan:
    from echelon.config.load import load_job

    values = {key: getattr(shape, key) for key in ("layers", "hidden", "heads", "kv_heads")}
    values |= {"ffn": shape.ffn, "vocab": shape.vocab, "max_positions": shape.max_positions}
    sets = [f"model.{key}={value}" for key, value in values.items()]
    trained = load_job("nano", [*sets, "model.tied=false"]).plan
    return generation_plan(trained, [f"mesh.tp={ranks}"])


def main() -> int:
    """Measure what is asked for, print a table, and say whether targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="34m,150m")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    missed = 0
    print("| size | prompts | transformers | ours, 1 rank | ours, 2 ranks |\n|---|---|---|---|---|")
    with RankPool(2) as pool:
        for name in asked.sizes.split(","):
            for batch in map(int, asked.batches.split(",")):
                rates = measure(name, batch, asked.rounds, pool)
                base = rates["transformers"]
                cells = [f"{rates[c]:.1f} ({rates[c] / base:.2f}x)" for c in ("1 rank", "2 ranks")]
                print(f"| {name} | {batch} | {base:.1f} | {' | '.join(cells)} |", flush=True)
                missed += rates["1 rank"] < BESIDE_TRANSFORMERS[1] * base
                missed += rates["2 ranks"] < BESIDE_TRANSFORMERS[2] * base
    return min(1, missed)


if __name__ == "__main__":
    sys.exit(main())
