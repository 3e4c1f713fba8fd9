# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: each rank holds some positions of every sequence.

Split: the sequence over `cp`; activations, labels and positions of a rank are those of its part
       (`core.attention_mask`), so everything but attention is as on one device.
Sent:  what lets each query meet each key, by `context.kind`: keys and values around a ring
       (`ring.py`: zigzag or striped placement) or gathered (`gathered.py`), or heads exchanged for
       positions (`ulysses.py`), alone or inside of a ring. Gradients are summed over `cp` together
       with those of data ranks (`parallel/data.py`).
Bytes: `context_bytes` in `cost/bytes/context_sent.py`.
Must divide: cp | sequence_length (2 ring_degree | sequence_length under zigzag); ulysses_degree |
       heads / tp.
Source: Liu et al., "Ring Attention", 2023; Brandon et al., "Striped Attention", 2023; Jacobs et
        al., "DeepSpeed-Ulysses", 2023; Fang and Zhao, "USP", 2024; Grattafiori et al., "Llama 3",
        2024, section 3.3.2 (gathered).
"""

from echelon.parallel.context.attention import ContextAttention

__all__ = ["ContextAttention"]
