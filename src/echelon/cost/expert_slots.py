"""How many rows stand ready for an expert where dispatch is padded: a number without the routing.

Source: Lepikhin et al., "GShard", 2020, section 2.2 (a capacity makes all shapes static).
"""

from __future__ import annotations


def slots_per_expert(num_tokens: int, num_sequences: int, capacity: int) -> int:
    """Return the rows that one rank keeps for one expert out of `num_tokens` tokens of its own.

    Tokens of the sequences take turns, so that each sequence has as many of them, or one more; an
    expert has room for `capacity` tokens of a sequence.
    """
    each, longer = divmod(num_tokens, num_sequences)
    return longer * min(capacity, each + 1) + (num_sequences - longer) * min(capacity, each)
