"""What the debugger shows below a tensor is found by its name, too."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json

import debugpy._vendored.force_pydevd
import torch

from flexinspect_hooks.debugger.pydevd_plugin import TensorChildren

children, tensor = TensorChildren(), torch.ones(2, 3, requires_grad=True)
tensor.sum().backward()
listed = [name for name, _, _ in children.get_contents_debug_adapter_protocol(tensor)]
by_name = children.get_dictionary(tensor)
print(json.dumps({
    "listed": listed,
    "by name": list(by_name),
    "shape": by_name["shape"],
    "dtype": children.resolve(tensor, "dtype"),
    "has gradient": children.resolve(tensor, "grad") is tensor.grad,
    "other": children.resolve(tensor, "no such child"),
}))
"""


def test_children_of_a_tensor_are_found_by_name() -> None:
    """In a process of its own, because pydevd changes the one that loads it."""
    command = [sys.executable, "-X", "frozen_modules=off", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"shape", "dtype", "device", "grad"} <= set(found["listed"])
    assert found["by name"] == found["listed"]
    assert (found["shape"], found["dtype"]) == ([2, 3], "torch.float32")
    assert found["has gradient"]
    assert found["other"] is None
