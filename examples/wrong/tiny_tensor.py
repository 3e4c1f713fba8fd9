"""The tensor + sequence parallel plan of the small decoder, in torch's own styles."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)


def tensor_plan(replicated_logits: bool = True) -> dict[str, ParallelStyle]:
    """Return name pattern -> style; between layers each rank holds its part of the tokens.

    Logits are whole on every rank, or split over the vocabulary for `loss_parallel`.
    """
    columns = {f"blocks.*.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"}
    logits = Replicate() if replicated_logits else Shard(-1)
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm1": SequenceParallel(),
        **columns,
        "blocks.*.o": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=logits, use_local_output=replicated_logits
        ),
    }
