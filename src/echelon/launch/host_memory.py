"""Keep freed memory: a training step frees and asks for the same large tensors again and again.

By default the C library gives each tensor of more than 128 KiB back to the kernel and gets zeroed
pages for the next one: page faults that cost 5 % of a step on CPU. With higher thresholds the
pages stay with the process; its peak does not change.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_THRESHOLD = 32 * 2**20
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Raise the thresholds of glibc's allocator; return False where there is no such allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _NEVER))
