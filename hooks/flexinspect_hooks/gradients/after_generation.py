"""Gradients of generated tokens, after the generation: repeats each forward pass, with a backward.

To check that a repeated forward pass equals the recorded one, a sample of their logits is compared:
the log-sum-exp, the chosen token's, and values spread evenly over the vocabulary.

FlexAttention has a backward on CUDA only; elsewhere the dense reference replaces it. Both use the
same patch as generation, so that every layer gets the same mask, scale and soft cap.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from flexinspect.core.errors import MaskError, summarize_error
from flexinspect.records.job import parse_steps
from flexinspect.records.prompt import Prompt
from flexinspect.records.step import Array, EventRecord, GradientRecord
from flexinspect_hooks.capture.model_layers import attention_layers, decoder_blocks
from flexinspect_hooks.capture.recorder import Recorder
from flexinspect_hooks.generation.decoding import Decoder
from flexinspect_hooks.generation.flex_patch import FlexPatch, Qkv
from flexinspect_hooks.generation.mask_source import BLOCK_TABLES, MaskSource
from flexinspect_hooks.gradients.reduction import GradientObserver
from flexinspect_hooks.observers.attention.mask_capture import open_cells
from flexinspect_hooks.python_internals.torch_private import set_flex_debug

DENSE_REFERENCE = "dense reference"
MAX_CELLS = 1 << 28  # of a mask that is made dense, over the heads that differ (256 MiB)
GRADIENTS_PHASE = "gradients"  # the phase of a run while gradients are computed
COST_EVENT = "gradients-cost"  # the kind of the event that reports what gradients cost
N_SAMPLED_LOGITS = 4096  # of a step, beside the chosen token's and the log-sum-exp

LOGIT_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""By the dtype of the logits: the difference due to rounding, relative to the largest logit.
The recorded forward pass read a cache, row by row; the repeated one computes all rows at once."""


class SampledLogits(Struct, frozen=True):
    """A sample of a step's logits: `values` (samples,), of which the last is the log-sum-exp.

    `token_id` is the token that the step chose, `n_logits` the size of the vocabulary.
    """

    token_id: int
    values: Tensor
    n_logits: int
    tolerance: float


def sample_logits(logits: Tensor, token_id: int) -> SampledLogits:
    """Sample a row of logits (V,)."""
    tolerance = LOGIT_TOLERANCES.get(logits.dtype, LOGIT_TOLERANCES[torch.float32])
    row = logits.detach().float()
    size = min(N_SAMPLED_LOGITS, len(row))
    indices = torch.linspace(0, len(row) - 1, size, device=row.device, dtype=torch.float64)
    chosen = row[token_id : token_id + 1]
    values = torch.cat([row[indices.round().long()], chosen, torch.logsumexp(row, 0)[None]])
    return SampledLogits(token_id, values, len(logits), tolerance)


def logits_distance(sampled: SampledLogits, logits: Tensor) -> float:
    """The largest difference to logits (V,), relative to the largest; Inf for other NaN or Inf."""
    if len(logits) != sampled.n_logits:
        return torch.inf
    new, old = sample_logits(logits, sampled.token_id).values, sampled.values
    finite = old.isfinite()
    is_alike = torch.equal(finite, new.isfinite())
    if not is_alike or not torch.allclose(new[~finite], old[~finite], 0, 0, equal_nan=True):
        return torch.inf
    if not bool(finite.any()):
        return 0.0
    largest = float(old[finite].abs().max())
    return float((new - old)[finite].abs().max()) / (largest or 1.0)


class GradientSpec(Struct, frozen=True):
    """What to differentiate ("logprob" or "margin"), and in which steps ("0,5-7" or "all").

    `use_flex` is whether FlexAttention itself is differentiated (None: where it has a backward).
    """

    target: str = "logprob"
    detect_anomaly: bool = False
    use_flex: bool | None = None
    steps: str = "all"


class FinishedBranch(Struct, frozen=True):
    """A branch that has ended; `token_ids` include its parents' before its `fork_step`."""

    generation: int
    prompt: Prompt
    token_ids: Sequence[int]
    source: MaskSource
    branch: int = 0
    fork_step: int = 0

    def event(self, kind: str, text: str) -> EventRecord:
        """An event of this branch's generation."""
        return EventRecord(kind, text, time.time(), self.generation)


class TokenGradients:
    """Keeps what the gradients of a generation need, and computes them after it, in its thread.

    `compiled` is whether generation ran compiled kernels. A failure becomes an event, and the run
    continues. The model stays unchanged: no `.grad` is written, and all hooks are removed.
    """

    def __init__(self, model: Any, spec: GradientSpec, *, compiled: bool) -> None:
        self._model, self._spec, self._compiled = model, spec, compiled
        self._steps = parse_steps(spec.steps)
        self._blocks = decoder_blocks(model, attention_layers(model))
        can_use_flex = flex_has_backward(next(model.parameters()).device)
        self._uses_flex = can_use_flex if spec.use_flex is None else spec.use_flex
        self._sampled_logits: dict[tuple[int, int], SampledLogits] = {}  # by branch and step
        self._has_run = False

    def begin_generation(self, recorder: Recorder) -> None:
        """Drop the state of the previous generation, and end the phase of its gradients."""
        self._sampled_logits.clear()
        if self._has_run:
            recorder.put(EventRecord("phase", "generating", time.time()))

    def on_token_chosen(self, branch: int, step: int, token_id: int, logits: Tensor) -> None:
        """Sample a step's logits (V,), to check later that the same forward pass is repeated."""
        if self._steps is None or step in self._steps:
            self._sampled_logits[branch, step] = sample_logits(logits, token_id)

    def compute(
        self, finished: FinishedBranch, recorder: Recorder, check_stop: Callable[[], object]
    ) -> None:
        """Record the gradients of a branch; `check_stop` may raise before each step."""
        started = time.perf_counter()
        steps = sorted(step for branch, step in self._sampled_logits if branch == finished.branch)
        done: list[GradientRecord] = []
        self._has_run = bool(steps)
        for step in steps:
            check_stop()
            fraction = {"fraction": len(done) / len(steps)}
            recorder.put(EventRecord("phase", GRADIENTS_PHASE, time.time(), data=fraction))
            sampled = self._sampled_logits[finished.branch, step]
            try:
                record = self._compute_with_fallback(finished, step, sampled, recorder)
            except Exception as error:
                text = f"Gradients were not computed from step {step} on: {summarize_error(error)}"
                recorder.put(finished.event("gradients-failed", text))
                break
            recorder.put(record)
            done.append(record)
            del self._sampled_logits[finished.branch, step]
        n_steps = len(finished.token_ids) - finished.fork_step
        text = f"--grads-steps {self._spec.steps} names none of the {n_steps} steps."
        if steps:
            text = _cost_text(done, n_steps, time.perf_counter() - started)
        recorder.put(finished.event(COST_EVENT, text))

    def _compute_with_fallback(
        self, finished: FinishedBranch, step: int, sampled: SampledLogits, recorder: Recorder
    ) -> GradientRecord:
        """The gradients of a step; after a failure of FlexAttention, by the dense reference."""
        try:
            return self.compute_step(finished, step, sampled)
        except Exception as error:
            if not self._uses_flex:
                raise
            text = (
                f"FlexAttention's own backward failed, so the {DENSE_REFERENCE} is used instead: "
            )
            text += summarize_error(error)
            recorder.put(finished.event("gradients-dense-fallback", text))
            self._uses_flex = False
            return self.compute_step(finished, step, sampled)

    def compute_step(
        self, finished: FinishedBranch, step: int, sampled: SampledLogits
    ) -> GradientRecord:
        """The gradients of a step; none if the repeated forward pass differs from the recorded."""
        started = time.perf_counter()
        run = partial(self._forward_backward, finished, step, sampled)
        note = _find_anomaly(partial(run, True)) if self._spec.detect_anomaly else None
        record = run(keeps_weights=False)
        return replace(record, anomaly=note, wall_ms=(time.perf_counter() - started) * 1e3)

    def _forward_backward(
        self, finished: FinishedBranch, step: int, sampled: SampledLogits, keeps_weights: bool
    ) -> GradientRecord:
        options = {"use_flex": self._uses_flex, "keeps_weights": keeps_weights}
        patch = GradientPatch(self._model, finished.source, compiled=self._compiled, **options)
        decoder = Decoder(self._model, finished.prompt)
        decoder.token_ids += finished.token_ids[:step]
        target, n_unreached = self._spec.target, 0
        with patch, GradientObserver(self._model, self._blocks) as observer, torch.enable_grad():
            # `forward` itself, as the model's own hooks belong to recorded steps.
            logits = decoder.run(self._model.forward)
            distance = logits_distance(sampled, logits)
            value, runner_up, scale, unit = target_gradient(logits, sampled.token_id, target)
            if distance <= sampled.tolerance:
                inputs = [*observer.parameters, *observer.leaves]
                gradients = torch.autograd.grad(logits, inputs, unit, allow_unused=True)
                of_parameters = gradients[: len(observer.parameters)]
                n_unreached = sum(one is None for one in of_parameters)
                observer.note_unreached_layers()
        factor = scale if 0 < scale < math.inf else 1.0  # from the unit vector's gradients
        return GradientRecord(
            generation=finished.generation,
            step=step,
            token_id=sampled.token_id,
            target=target,
            value=value,
            scale=scale,
            path=patch.path,
            logits_error=distance,
            tolerance=sampled.tolerance,
            wall_ms=0.0,
            branch=finished.branch,
            runner_up_id=runner_up,
            n_unreached=n_unreached,
            stats=tuple(
                replace(stat, norm=stat.norm * factor, max=stat.max * factor)
                for stat in observer.stats.values()
            ),
            tokens=_token_norms(observer, factor) if observer.stats else None,
            layers=_layer_norms(observer, factor) if observer.stats else None,
        )


def _cost_text(done: Sequence[GradientRecord], n_steps: int, wall_s: float) -> str:
    if not done:
        return "No gradients were computed."
    agree = sum(record.matches_recorded for record in done)
    return (
        f"Gradients of {len(done)} of {n_steps} tokens took {wall_s:.1f} s, "
        f"{wall_s / len(done):.2f} s each, by the {done[0].path}; {agree} of {len(done)} "
        "forward passes gave the recorded logits."
    )


def _find_anomaly(run: Callable[[], object]) -> str | None:
    """Autograd's report on the function that made a NaN, with the traceback of its forward."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.set_detect_anomaly(True):
                run()
        except RuntimeError as error:
            if "returned nan values" not in str(error):  # not raised by anomaly mode
                raise
            messages = [str(warning.message) for warning in caught]
            traces = [text for text in messages if "Traceback of forward call" in text]
            return "\n".join([str(error), *traces])
    return None


def target_gradient(
    logits: Tensor, token_id: int, target: str
) -> tuple[float, int | None, float, Tensor]:
    """A token's log-probability, or its logit minus the next best, and the gradient.

    Returns the value, the next best token of a margin, the norm of the gradient at the logits, and
    the gradient (V,) scaled to length 1. It is computed in float64 before: the gradient of a token
    with a probability near 1 is so small that it would be lost in the model's dtype.
    """
    row = logits.detach().double().requires_grad_(True)
    runner_up = None
    if target == "margin":
        others = row.detach().clone()
        others[token_id] = -torch.inf
        runner_up = int(others.argmax())
        value = row[token_id] - row[runner_up]
    else:
        value = torch.log_softmax(row, -1)[token_id]
    (gradient,) = torch.autograd.grad(value, row)
    scale = float(gradient.norm())
    unit = gradient / scale if 0 < scale < math.inf else gradient
    return float(value.detach()), runner_up, scale, unit.to(logits.dtype)


def _token_norms(observer: GradientObserver, factor: float) -> Array | None:
    """Return gradient times input, and the gradient's norm, of each token: float (2, positions)."""
    embeddings, gradient = observer.embeddings, observer.gradient
    if embeddings is None:
        return None
    inputs = embeddings[0].double()
    slope = torch.zeros_like(inputs) if gradient is None else gradient[0].double()
    both = torch.stack([(slope * inputs).sum(-1), slope.norm(dim=-1)]) * factor
    return both.float().cpu().numpy()


def _layer_norms(observer: GradientObserver, factor: float) -> Array:
    """The norms at the embeddings and at each layer's output: 0 if unreached, NaN if unobserved."""
    norms = np.full(max(observer.blocks, default=-1) + 2, np.nan, np.float32)
    for layer in (-1, *observer.blocks):
        norms[layer + 1] = float(observer.norms.get(layer, 0.0)) * factor
    return norms


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention output (batch, q heads, rows, D), differentiable on any device.

    `query` is (batch, q heads, rows, D), `key` and `value` (batch, kv heads, keys, D), `visible`
    bool (1 or q heads, rows, keys). It rounds as uncompiled FlexAttention does: scores and softmax
    in at least float32. The output and the gradient of a row without keys are 0.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.to(wide) @ key.to(wide).mT * factor
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # The lowest float, not -Inf: the softmax of a row of -Inf would have no gradient.
    closed = scores.masked_fill(~visible, torch.finfo(wide).min)
    weights = torch.softmax(closed, -1).masked_fill(~visible, 0.0)
    return weights.to(value.dtype) @ value


def flex_has_backward(device: torch.device) -> bool:
    """Whether FlexAttention can be differentiated on a device (torch 2.11 to 2.15)."""
    return device.type == "cuda"


class GradientPatch(FlexPatch):
    """A `FlexPatch` whose attention can be differentiated.

    Without `keeps_weights`, the dense attention of each layer is recomputed in the backward pass,
    so that memory holds the weights (heads x rows x keys) of one layer at a time. Autograd's
    anomaly mode needs them kept, to name the line that produced a NaN.
    """

    def __init__(
        self,
        model: nn.Module,
        source: MaskSource,
        *,
        compiled: bool,
        use_flex: bool,
        keeps_weights: bool = False,
    ) -> None:
        super().__init__(model, source, compiled=compiled and use_flex)
        self._executed_compiled = compiled
        self._uses_flex = use_flex
        self._keeps_weights = keeps_weights
        self._dense_masks: dict[tuple[int, int], tuple[BlockMask, Tensor]] = {}

    @property
    def path(self) -> str:
        """Which attention is differentiated: the dense reference, or FlexAttention itself."""
        if not self._uses_flex:
            return DENSE_REFERENCE
        return "flex compiled" if self.compiled else "flex"

    def __enter__(self) -> GradientPatch:
        super().__enter__()
        if self._uses_flex:
            # Plain Python FlexAttention, as generation runs it, does not support a backward pass.
            set_flex_debug(False)
        return self

    def _make_mask(self, *args: Any, **kwargs: Any) -> BlockMask:
        block_mask = super()._make_mask(*args, **kwargs)
        return with_query_blocks(block_mask) if self._uses_flex else block_mask

    def _flex(
        self, qkv: Qkv, block_mask: BlockMask | None, scaling: float | None, softcap: float | None
    ) -> tuple[Tensor, Tensor | None]:
        if self._uses_flex:
            return super()._flex(qkv, block_mask, scaling, softcap)
        visible = self._dense_mask(block_mask, qkv[0].shape[1])
        call = partial(dense_attention, visible=visible, scale=scaling, softcap=softcap)
        if self._keeps_weights:
            return call(*qkv), None
        exact: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(call, *qkv, **exact), None

    def _kernel(self, q_len: int) -> Any:
        return super()._kernel(q_len) if self.compiled else flex_attention

    def _dense_mask(self, block_mask: BlockMask | None, heads: int) -> Tensor:
        if block_mask is None:
            raise MaskError("The layer received no mask, so the executed mask is unknown.")
        key = (id(block_mask), heads)
        if key not in self._dense_masks:
            n_q, n_kv = map(int, block_mask.seq_lengths)
            cells = None
            if n_q * n_kv <= MAX_CELLS:
                cells = open_cells(block_mask, heads, compiled=self._executed_compiled)
            if cells is None:
                raise MaskError(f"The mask of {n_q} x {n_kv} cells is too large for a dense mask.")
            self._dense_masks[key] = (block_mask, cells)  # keeps the mask alive: its id is the key
        return self._dense_masks[key][1]


def with_query_blocks(block_mask: BlockMask) -> BlockMask:
    """A block mask that also has the transposed tables, which a backward pass needs."""
    names = (*BLOCK_TABLES, "BLOCK_SIZE", "mask_mod", "seq_lengths")
    parts: dict[str, Any] = {name: getattr(block_mask, name) for name in names}
    return BlockMask.from_kv_blocks(**parts, compute_q_blocks=True)
