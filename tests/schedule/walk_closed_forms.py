"""Walk over p = 2..16 and every m = p..8p: each schedule has exactly its closed forms.

``python -m tests.schedule.walk_closed_forms`` takes many minutes; the tests take samples of it.
Every m has F = B = W; where m is a multiple of p, or one more, also other times and three stages
on a rank. All schedules are proved up to m = 2p, and run to their end from there on.
Name ranks to walk over those alone: ``python -m tests.schedule.walk_closed_forms 3 4``.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.schedule.closed_forms import builders, differences, some_times


def main(ranks: list[int]) -> int:
    """Print how many schedules were held against their closed forms; return how many differ."""
    wrong = 0
    for p in ranks:
        count: Counter[str] = Counter()
        for m in range(p, 8 * p + 1):
            others = int(m % p <= 1)
            for builder in builders(p, m, (1, 2, 3) if others else (1, 2)):
                count[builder.name] += 1
                times = some_times(100 * p + m, others)
                for difference in differences(builder, times, proves=m <= 2 * p):
                    wrong += 1
                    sys.stdout.write(f"{difference}\n")
        told = ", ".join(f"{name} {number}" for name, number in count.items())
        sys.stdout.write(f"p = {p}: {told}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{wrong} differences\n")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main([int(word) for word in sys.argv[1:]] or list(range(2, 17)))))
