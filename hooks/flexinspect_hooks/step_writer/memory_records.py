"""Makes the record of a step's memory."""

from __future__ import annotations

from msgspec.structs import replace

from flexinspect.records.step import MemoryRecord
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts
from flexinspect_hooks.step_writer.values import Values


class MemoryRecords:
    """Adds the size of the KV cache to the memory that was read at the end of a step."""

    def record(self, step: StepFacts, kept: MemoryRecord, values: Values, draft: StepDraft) -> None:
        """Write the step's `MemoryRecord`; the cache's size is computed from the calls' shapes."""
        kv_cache = 0
        for call in draft.calls:
            n_values = call.batch * call.kv_heads * call.kv_len * call.head_dim
            kv_cache += 2 * n_values * dtype_size(call.dtype)
        draft.memory = replace(kept, kv_cache=kv_cache)


def dtype_size(name: str) -> int:
    """Return the bytes of a value of a dtype of torch, by its name: "bfloat16", "float8_e4m3fn"."""
    if name.startswith("float8") or name in ("bool", "int8", "uint8"):
        return 1
    bits = int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
    return bits // 8
