"""Creates a real architecture at its real size with random weights, in seconds even on a CPU.

`normal_` draws some hundred million numbers per second, which takes minutes for billions of
parameters. Here one block of about four million normal numbers is drawn once, and every matrix is
filled with slices of it. The length of the block is a prime larger than any row count in use, so no
two rows of a matrix start at the same position of it. The values do not depend on the device.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

from flexinspect.inputs.hub_download import OnLoadProgress
from flexinspect_hooks.python_internals.torch_private import has_init_weights, init_weights

NOISE_BLOCK_SIZE = 4_194_301  # the largest prime below 2**22
# transformers' own initialisation of larger modules (experts) is slow; they are matrices anyway.
_LARGE = 16_000_000


def count_on_meta(config: Any, *, trust_remote_code: bool = False) -> int:
    """Return the exact number of parameters of an architecture, without allocating them."""
    model = _on_meta(config, "float32", trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def build_random(
    config: Any,
    *,
    device: str,
    dtype: str,
    seed: int,
    report: OnLoadProgress,
    trust_remote_code: bool = False,
) -> Any:
    """Return the causal LM of a transformers configuration with seeded random weights.

    Matrices are normal with the configuration's `initializer_range`; norms, biases and buffers such
    as rotary frequencies are initialised by transformers. Equal arguments give equal weights.
    """
    import torch

    model = _on_meta(config, dtype, trust_remote_code)
    _allocate(model, device)
    cuda_devices = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=cuda_devices), torch.no_grad():
        torch.manual_seed(seed)
        block = torch.randn(NOISE_BLOCK_SIZE, generator=torch.Generator().manual_seed(seed))
        std = getattr(config.get_text_config(), "initializer_range", None) or 0.02
        block = (block * std).to(device=device, dtype=getattr(torch, dtype))
        _fill_parameters(model, block, seed, report)
        _init_special_modules(model)
    model.tie_weights()
    return model


def _on_meta(config: Any, dtype: str, trust_remote_code: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config),  # `from_config` writes the dtype into its argument
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
        )


def _allocate(model: Any, device: str) -> None:
    # Not `to_empty`, which allocates tied parameters separately.
    import torch

    known: dict[int, Any] = {}
    for module in model.modules():
        own = {"recurse": False, "remove_duplicate": False}
        for name, old in list(module.named_parameters(**own)):
            new = known.get(id(old))
            if new is None:
                empty = torch.empty_like(old, device=device)
                new = known[id(old)] = torch.nn.Parameter(empty, requires_grad=False)
            setattr(module, name, new)
        for name, old in list(module.named_buffers(**own)):
            setattr(module, name, torch.zeros_like(old, device=device))


def _fill_parameters(model: Any, block: Any, seed: int, report: OnLoadProgress) -> None:
    parameters = list(model.named_parameters())
    total = sum(parameter.numel() for _, parameter in parameters)
    done, reported = 0, 0.0
    for name, parameter in parameters:
        if parameter.dim() >= 2:
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            _tile(parameter, block, int.from_bytes(digest, "little") % NOISE_BLOCK_SIZE)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        done += parameter.numel()
        if done / total - reported >= 0.02 or done == total:
            reported = done / total
            report("making weights", {"fraction": reported})


def _tile(parameter: Any, block: Any, offset: int) -> None:
    flat = parameter.view(-1)
    start, position = 0, offset
    while start < flat.numel():
        n = min(flat.numel() - start, block.numel() - position)
        flat[start : start + n].copy_(block[position : position + n])
        start, position = start + n, 0


def _init_special_modules(model: Any) -> None:
    """Let transformers initialise everything but plain matrices: norms, rotary tables, scales."""
    import torch

    stack = [(model, model)]
    while stack:
        owner, module = stack.pop()
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        has_buffers = any(True for _ in module.buffers(recurse=False))
        is_plain = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        if has_buffers or (0 < size < _LARGE and not is_plain):
            init_weights(owner, module)
        # A model inside a model (a vision tower for instance) initialises its own modules.
        for child in module.children():
            stack.append((child if has_init_weights(child) else owner, child))
