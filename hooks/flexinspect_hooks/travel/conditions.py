"""Under which circumstances logits were computed, and what has changed since."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

_SAMPLES = 1024
"""Values per tensor of the weights that are looked at, evenly spread."""


@dataclass(frozen=True, slots=True)
class RunConditions:
    """What bits depend on beside the input: weights, threads, modes and precision of torch."""

    weights: str
    threads: int
    training: bool
    precision: str
    deterministic: bool

    @classmethod
    def current(cls, model: nn.Module) -> RunConditions:
        """Return the conditions under which `model` would run now."""
        return cls(
            weights=weights_fingerprint(model),
            threads=torch.get_num_threads(),
            training=model.training,
            precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def changes(self, now: RunConditions) -> list[str]:
        """Return a sentence for each condition that is another one now."""
        said = []
        if self.weights != now.weights:
            said.append("The weights of the model have changed.")
        if self.threads != now.threads:
            said.append(f"torch ran on {self.threads} threads, and now runs on {now.threads}.")
        if self.training != now.training:
            said.append(f"The model is in {'training' if now.training else 'evaluation'} mode now.")
        if self.precision != now.precision:
            said.append(f"Matrix products are of precision {now.precision} now.")
        if self.deterministic != now.deterministic:
            said.append("torch.use_deterministic_algorithms was switched.")
        return said


def weights_fingerprint(model: nn.Module) -> str:
    """Return a name for the weights as they are in memory: equal weights have equal names.

    Of each tensor up to `_SAMPLES` values are read, so that it takes milliseconds; and how often
    torch has written to it counts too, since a change may miss all of these values.
    """
    digest = hashlib.blake2b(digest_size=16)
    sums = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{_version(tensor)}".encode())
        sums.append(checksum(_sample_values(tensor.detach())))
    if sums:
        digest.update(torch.stack([one.cpu() for one in sums]).numpy().tobytes())
    return digest.hexdigest()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _sample_values(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLES, 1)]


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(values: Tensor) -> Tensor:
    """Return a 0-dim int64 on the device that any changed bit of `values` changes.

    A sum of the bits as integers: unlike a hash it costs one pass and never waits for the device.
    Two changes may cancel each other; those of a wrong logit row do not.
    """
    whole = values.detach().contiguous().view(-1)
    if whole.is_complex():
        whole = torch.view_as_real(whole).view(-1)
    return whole.view(_AS_INTEGERS[whole.element_size()]).sum(dtype=torch.int64)
