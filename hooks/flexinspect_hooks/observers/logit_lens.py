"""The logit lens of level extreme: what the final norm and the output head make of each layer.

The method is that of nostalgebraist, "interpreting GPT: the logit lens" (2020): the newest row of a
layer's output is read as if it were the last layer's. The lens of the last layer is compared with
the model's own logits, so that a readout of another form is reported, not drawn as if it were one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.records.step import SPARSE_LENS_EVENT
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.model_layers import output_head
from flexinspect_hooks.capture.step_clock import StepContext

TOP_K = 5

N_FIRST = 8
"""The first steps of a run, which are read whatever it costs."""
MAX_SHARE = 0.1
"""Share of the model's time that the lens may take in later steps: the head of a large vocabulary
costs as much as several layers, once per layer that is read."""

_NORM_NAMES = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm")
"""The last norm, as transformers names it beside the list of decoder layers."""


_SPARSE = (
    "From step {} on the logit lens reads some steps only, because it takes more than a tenth of "
    "the model's time; with fewer --layers it reads more steps."
)


class LogitLens:
    """Reads layer outputs through the final norm and the output head of one model.

    The modules are called by their `forward`, so that hooks of the user on them do not run.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[int, tuple[str, nn.Module]]) -> None:
        self._n_read, self._spent_s, self._model_s = 0, 0.0, 0.0
        self._has_skipped = False
        head = output_head(model)
        self.reason = "" if head is not None and blocks else "the model has no output head"
        if head is None or not blocks:
            return
        self._last = max(blocks)
        norm = final_norm(model, blocks[self._last][0])
        self._head = weakref.ref(head)
        self._norm = weakref.ref(norm) if norm is not None else None
        self._rescale = logit_scaling(getattr(model, "config", None))

    def reduce(
        self,
        outputs: Sequence[tuple[int, Tensor]],
        layers: Sequence[int],
        step: StepContext,
        buffer: StepBuffer,
    ) -> list[int]:
        """Read the newest row of these layers, unless the lens has taken too much time so far.

        `outputs` are (batch, rows, hidden) by layer. Returns the layers that were read. On an
        accelerator the time is that in which the work was submitted.
        """
        started = time.perf_counter()
        self._model_s += step.wall_ms / 1e3
        if self.reason:
            return []
        if self._n_read >= N_FIRST and self._spent_s > MAX_SHARE * self._model_s:
            if not self._has_skipped:
                self._has_skipped = True
                step.events.append((SPARSE_LENS_EVENT, _SPARSE.format(step.step)))
            return []
        self._n_read += 1
        read = self._reduce(outputs, layers, step, buffer)
        self._spent_s += time.perf_counter() - started
        return read

    def _reduce(
        self,
        outputs: Sequence[tuple[int, Tensor]],
        layers: Sequence[int],
        step: StepContext,
        buffer: StepBuffer,
    ) -> list[int]:
        """Reduce the newest rows; the last layer's too, to compare it with the model's logits."""
        chosen = {*layers, self._last}
        kept = {layer: output[0, -1] for layer, output in outputs if layer in chosen}
        if not kept:
            return []
        logits = self._read(list(kept.values()))
        logprobs = logits.log_softmax(-1)
        top, ids = logprobs.topk(min(TOP_K, logits.shape[-1]), dim=-1)
        buffer.put("lens.logprobs", top)
        buffer.put("lens.ids", ids.int())
        if step.token_id is not None:
            logprob = logprobs[:, step.token_id]
            rank = (logprobs > logprob[:, None]).sum(-1)
            buffer.put("lens.chosen", torch.stack((rank.float(), logprob), 1))
        if step.logits is not None and self._last in kept:
            own = step.logits.float().to(logprobs.device).log_softmax(-1)
            difference = (logprobs[list(kept).index(self._last)] - own).abs()
            # -Inf minus -Inf is NaN: a token that the model masks itself.
            buffer.put("lens.error", difference.nan_to_num(nan=0.0).max())
        return list(kept)

    def _read(self, rows: list[Tensor]) -> Tensor:
        """Return the logits (layers, vocabulary) in float32 of rows (hidden,)."""
        head = self._head()
        norm = self._norm() if self._norm is not None else None
        if head is None:
            raise RuntimeError("the model was deleted")
        target = next(iter((norm or head).parameters()), rows[-1])
        hidden = torch.stack([row.to(target.device) for row in rows])[None]
        hidden = hidden if norm is None else norm.forward(hidden)
        weight = next(iter(head.parameters()), hidden)
        logits: Tensor = head.forward(hidden.to(weight.device))[0].float()
        return self._rescale(logits)


def final_norm(model: nn.Module, block: str) -> nn.Module | None:
    """Return the norm beside the list of decoder layers, of which `block` names one.

    "model.layers.3" is in the list "model.layers", whose parent is "model". None without a norm.
    """
    container = block.rpartition(".")[0]
    parent = model.get_submodule(container.rpartition(".")[0])
    named = (getattr(parent, name, None) for name in _NORM_NAMES)
    return next((one for one in named if isinstance(one, nn.Module)), None)


def logit_scaling(config: Any) -> Callable[[Tensor], Tensor]:
    """Return what the model does to the head's output: a factor (Cohere, Granite) or a softcap.

    Gemma 2 caps logits: c * tanh(logit / c), https://arxiv.org/abs/2408.00118.
    """
    text = getattr(config, "text_config", None) or config
    factor = getattr(text, "logit_scale", None) or 1.0
    divisor = getattr(text, "logits_scaling", None) or 1.0
    cap = getattr(text, "final_logit_softcapping", None)

    def rescale(logits: Tensor) -> Tensor:
        logits = logits * (factor / divisor)
        return cap * torch.tanh(logits / cap) if cap else logits

    return rescale
