"""Making a mask evaluates its mask_mod on the whole grid, once more for each head that is named."""

import resource
from pathlib import Path

import kit
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

LENGTH, HEADS = 2048, 8

STATUS = Path("/proc/self/status")


def peak_mib() -> int:
    """Return the peak of the process; `getrusage` may count what its parent held, too."""
    if STATUS.exists():
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20


def grown_by(heads: int | None, n: int) -> int:
    """Return by how much making a mask raises the peak, in MiB."""
    before = peak_mib()
    create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, None, heads, n, n, "cpu")
    return peak_mib() - before


grown_by(None, 256)
for heads in (None, HEADS):
    print(
        f"grid 1 x {heads or 1} x {LENGTH} x {LENGTH}: over 100 MiB:", grown_by(heads, LENGTH) > 100
    )
before = peak_mib()
rows = kit.numbers(1, HEADS, LENGTH, 16)
F.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
print("attention itself: over 100 MiB:", peak_mib() - before > 100)
