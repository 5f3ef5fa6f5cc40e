"""A dispatch-mode logger makes flex fail, and flex still fails when the logger is gone."""

from typing import Any

import kit
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode


class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


query = kit.numbers(1, 1, 8, 16)


def attempt(when: str) -> None:
    try:
        flex_attention(query, query, query)
        print(f"{when}: it runs")
    except Exception as error:
        print(f"{when}: {type(error).__name__}")


attempt("before")
with Log():
    attempt("inside")
attempt("after")
torch._dynamo.reset()
attempt("after a reset of dynamo")
