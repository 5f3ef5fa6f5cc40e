"""A mask_mod that is new code at each step makes a new graph at each step."""

from collections.abc import Callable
from typing import Any

import kit
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

STEPS = 5

Rule = Callable[[Any, Any, Any, Any], Any]


def fresh(offset: int) -> Rule:
    made: dict[str, Rule] = {}
    exec(f"def rule(b, h, q_idx, kv_idx): return kv_idx <= q_idx + {offset}", made)
    return made["rule"]


def over_a_number(offset: int) -> Rule:
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + offset


def over_a_tensor(offset: int) -> Rule:
    held = torch.tensor(offset)
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + held


def graphs(make: Callable[[int], Rule]) -> int:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    call = torch.compile(flex_attention, backend=counter, fullgraph=True)
    query = kit.numbers(1, 1, 1, 16)
    for n_keys in range(8, 8 + STEPS):
        keys = kit.numbers(1, 1, n_keys, 16, seed=n_keys)
        mask = create_block_mask(make(n_keys - 1), None, None, 1, n_keys, "cpu")
        call(query, keys, keys, block_mask=mask)
    return counter.frame_count


for make in (fresh, over_a_number, over_a_tensor):
    print(f"{make.__name__}: {graphs(make)} graphs in {STEPS} steps")
