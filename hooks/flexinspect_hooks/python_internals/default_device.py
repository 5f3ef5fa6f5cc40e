"""Where our tensors are created in a program that chose a default device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_by_default() -> Iterator[None]:
    """Create tensors on the CPU inside of the block, unless a call names a device.

    `torch.set_default_device` and `with torch.device(...)` of the program concern our code too, as
    it runs in the program's thread. The block costs nothing if the program chose no other device;
    else each function of torch that is called in it passes through one more function mode.
    """
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield
