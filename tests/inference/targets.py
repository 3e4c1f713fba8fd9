"""What ranks do in the tests of generation: make a model, write, and tell what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echelon.config.generation import Sampling
from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.cost.bytes.generate import kind_cache_sizes
from echelon.inference.cache import KindCaches
from echelon.inference.generator import Generator, Writing
from echelon.inference.operations import CacheOperations
from echelon.launch.context import RankContext
from echelon.layout.stage import part_of
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.transport.recorder import Recorder
from echelon.training.inference import empty_decoder, put_off_biases, weight_shards
from tests.inference.cases import router_biases_of, sequences_of, weights_of


@dataclass(frozen=True)
class Written:
    """What one rank wrote, held and sent."""

    texts: list[list[int]]
    cache_bytes: int
    num_free: int
    num_blocks: int
    sent: dict[str, int]


def write(context: RankContext, argument: Any) -> Written:
    """Write after prompts on this rank."""
    plan = Plan.from_json(argument["plan"])
    events = EventList()
    groups = rank_groups(plan, Recorder(context.rank, events, context.progress))
    part = part_of(plan, context.rank)
    precision = plan.mathematics.precision.master
    dtype = TORCH_DTYPES[precision]
    decoder = empty_decoder(plan, part, groups, dtype, context.device)
    weights = weights_of(plan.model, dtype)
    for name, shards in weight_shards(plan, part, decoder, groups).items():
        for one in shards:
            place = zip(one.offset, one.tensor.shape, strict=True)
            one.tensor.copy_(weights[name][tuple(slice(at, at + n) for at, n in place)])
    put_off_biases(decoder)
    operations = decoder.operations
    assert isinstance(operations, CacheOperations)
    operations.router_biases = router_biases_of(plan.model, dtype)
    prompts = argument["prompts"]
    size = kind_cache_sizes(
        plan,
        part.blocks,
        [len(one) for one in prompts],
        max_tokens=argument["max_tokens"],
        block_tokens=argument.get("block_tokens", 4),
    )
    operations.caches = KindCaches(size, dtype, context.device)
    sequences = sequences_of(prompts, argument.get("separator"))
    writing = Writing(
        max_tokens=argument["max_tokens"],
        sampling=Sampling(**argument.get("sampling", {})),
        end=argument.get("end"),
    )
    events.events.clear()
    Generator(plan, decoder, groups).write(sequences, writing)
    assert operations.caches.num_bytes == size.num_bytes
    return Written(
        texts=[one.written for one in sequences],
        cache_bytes=operations.caches.num_bytes,
        num_free=operations.caches.num_free,
        num_blocks=sum(one.num_blocks for one in size.sizes),
        sent=dict(events.bytes_by_axis()),
    )
