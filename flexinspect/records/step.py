"""What a trace can say: frozen records, the contract between capture, trace and views.

Records are dumb: no I/O, no torch. Every record that belongs to a step is reached through
`StepRecord`; generation and branch are given once, on the step. Times are seconds since the epoch
(`*_at`) or milliseconds (`*_ms`), sizes are bytes, positions count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexinspect.records.finding import Finding, Repeat
from flexinspect.records.prompt import Segment
from flexinspect.records.training_step import TrainingStepRecord

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    # Whoever runs the user's program must not load numpy first: it reads its environment once.
    Array = Any

LEVELS = ("basic", "advanced", "extreme")
UNKNOWN = -1
"""The `chosen_id` and `chosen_rank` of a step when nobody saw which token it chose."""
STANDALONE_CALLS = "calls outside of a model"
"""What the `sample_id` of a generation begins with that is a call of FlexAttention by itself."""
STANDALONE_RAISED = "a call outside of a model that raised"
"""The `sample_id` of a generation that such a call would have been."""
STANDALONE_MASKS = "masks built, and no call after them"
"""The `sample_id` of a generation that is nothing but masks that were built."""
TRAIN = "train"
"""The phase of a step of an optimizer; the others are of generation."""
PATHS = ("flex uncompiled", "flex compiled", "sdpa", "eager", "other")
MASK_ARRAYS = ("cells", "averaged", "partial", "full", "ruled")
"""The fields of `MaskRecord` that hold arrays, in the order they are stored."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One position of the sequence.

    `token` is the vocabulary's own string, `text` what it adds to the text, so that texts joined
    are the text (a token that ends in the middle of a character adds nothing). `step` is the step
    that chose it (None in the prompt). `special` marks BOS, EOS and the like.
    """

    pos: int
    token_id: int
    token: str
    text: str
    position_id: int
    segment: int
    special: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the top-k tokens of a step: before processors (logit, logprob) and after (score).

    The scores are NaN when what processors made of the logits was not seen.
    """

    rank: int
    token_id: int
    text: str
    logit: float
    logprob: float
    score: float
    score_logprob: float


@dataclass(frozen=True, slots=True)
class LogitsRecord:
    """The distribution of the newest row, natural logarithms.

    `margin` is the logit of the best minus the second; `chosen_rank` counts from 0; it
    and `chosen_id` are `UNKNOWN`, and `chosen_logprob` NaN, when the choice was not seen.
    `histogram` holds counts of the logits in equal bins between `histogram_min` and
    `histogram_max`.
    """

    entropy: float
    margin: float
    chosen_id: int
    chosen_rank: int
    chosen_logprob: float
    n_nan: int
    n_inf: int
    histogram_min: float
    histogram_max: float
    histogram: tuple[int, ...]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One attention call of one layer in one step.

    `path` is one of `PATHS`, `backend` the name under which transformers dispatched it, `mask` the
    fingerprint of the mask received (None when the layer got no mask). `gate` is the largest
    deviation from 1 of the newest row's attention mass over the executed mask, over heads (None
    when it was not computed); `gate_kind` says how: "lse" or "output". A `softcap` c makes
    c * tanh(score / c) of each scaled score, before the mask. Of own code more is known: `handed`
    is the mask that the layer was given, in words (None when its kernel got the same), and
    `swallowed` the exception that the call made up for (None when there was none). `causal` is
    whether the layer calls itself causal (None when it does not say), `window` how many keys its
    sliding window holds (None without one).
    """

    layer: int
    path: str
    backend: str
    mask: str | None
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    scale: float | None
    gate: float | None = None
    gate_kind: str | None = None
    softcap: float | None = None
    handed: str | None = None
    swallowed: str | None = None
    causal: bool | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """A block mask that was built: in which layer (None: outside of them), and at what cost.

    `batch` and `heads` are None where one serves all. `peak_growth` is by how many bytes the peak
    memory grew, of the process or on the GPU; what fits under an earlier peak is not seen.
    """

    layer: int | None
    batch: int | None
    heads: int | None
    q_len: int
    kv_len: int
    rule: str
    wall_ms: float
    peak_growth: int


@dataclass(frozen=True, slots=True)
class InputsRecord:
    """What a step was fed beside its tokens, and what the cache held around it.

    `positions` are the position ids of batch row 0 as runs (first, how many) of ids that rise by
    one; empty when the layers were handed none. `cached_before` and `cached_after` count the keys
    that the cache held per layer, -1 for a layer that counts none; empty without a cache.
    """

    batch: int
    positions: tuple[tuple[int, int], ...] = ()
    cached_before: tuple[int, ...] = ()
    cached_after: tuple[int, ...] = ()

    @property
    def position_ids(self) -> list[int]:
        """The position ids one by one."""
        return [id_ for first, n in self.positions for id_ in range(first, first + n)]


@dataclass(frozen=True, slots=True)
class LayerStatRecord:
    """Statistics of one module's output in one step, over the rows of that step.

    `bad_row` is the first of these rows with a NaN or infinity, None when there is none.
    """

    layer: int
    module: str
    n_nan: int
    n_inf: int
    min: float
    max: float
    mean: float
    std: float
    norm: float
    bad_row: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Bytes at the end of a step; CUDA figures are None elsewhere."""

    rss: int
    model: int
    kv_cache: int
    cuda_allocated: int | None = None
    cuda_reserved: int | None = None
    cuda_peak: int | None = None


@dataclass(frozen=True, slots=True)
class MaskRecord:
    """A mask as a layer received it, stored once per fingerprint.

    `kind` is "block" (BlockMask), "bool" or "float" (dense tensor), "none", or "none, causal" (no
    mask, on a path that is causal by itself). `q_offset` is the position of row 0 in the sequence,
    `kv_offset` that of key 0 (above 0 once a sliding cache has dropped keys). `rule` names the rule
    (module and qualified name), `rule_source` its file and first line where known. `heads` is what
    the mask was made for; the rule of one made for 1 may still tell heads apart. `cells` is the
    executed mask of batch 0, bool of shape (heads, n_q, n_kv), the heads being the query heads, or
    1 when all share it, or None when it was not evaluated. A bool mask that was added to the scores
    (eager attention) closes nothing. `averaged` says which rows of a float mask are at its lowest
    float in every cell, bool (1 or heads, n_q), None when no row is: that is meant to close them,
    but softmax gives all these keys the same weight, so that `cells` has them open. `partial` and
    `full` are the block tables of batch 0, bool (heads, row blocks, key blocks); `full` is None
    when no block is full, both are None at level basic for a decode row. `ruled` is what the rule
    by itself opens of each block, uint8 (1 or heads, row blocks, key blocks): 0 nothing, 1 some, 2
    all of its cells; only of compiled calls, whose cells do not tell.
    """

    fingerprint: str
    kind: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    q_offset: int
    kv_offset: int = 0
    block_q: int | None = None
    block_kv: int | None = None
    rule: str | None = None
    rule_source: str | None = None
    compiled: bool = False
    cells: npt.NDArray[np.bool_] | None = None
    averaged: npt.NDArray[np.bool_] | None = None
    partial: npt.NDArray[np.bool_] | None = None
    full: npt.NDArray[np.bool_] | None = None
    ruled: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """A wide fact of a step: for instance stream "attention.mass", float (layers, heads, segments).

    `layer` is None when the array holds all layers. `dtype` names the true type when numpy has
    none for it ("bfloat16", stored as uint16); otherwise it is the array's own.
    """

    stream: str
    array: Array
    layer: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something that happened: a phase ("loading"), a hook switched off, an error, a warning."""

    kind: str
    text: str
    at: float
    generation: int | None = None
    step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """A piece of what the program printed, as it came: `stream` is "stdout" or "stderr".

    `generation` and `step` are those of the last step that had begun when it was read (None before
    the first). Bytes that are not UTF-8 are replaced in `text`.
    """

    stream: str
    text: str
    at: float
    generation: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything that one forward of a generation left: one transaction of the trace.

    `tokens` are the tokens this step chose, `masks` only those fingerprints that are new.
    `wall_ms` is the forward with the choice of the token, `capture_ms` what capture took of it.
    `repeats` are findings of earlier steps that were met again; they are counted there, so a step
    that is read back has none. Of a training step (phase "train") `training` tells.
    """

    generation: int
    step: int
    phase: str
    q_len: int
    kv_before: int
    kv_after: int
    started_at: float
    wall_ms: float
    capture_ms: float
    branch: int = 0
    logits: LogitsRecord | None = None
    tokens: tuple[TokenRecord, ...] = ()
    inputs: InputsRecord | None = None
    calls: tuple[CallRecord, ...] = ()
    builds: tuple[BuildRecord, ...] = ()
    layer_stats: tuple[LayerStatRecord, ...] = ()
    memory: MemoryRecord | None = None
    masks: tuple[MaskRecord, ...] = ()
    arrays: tuple[ArrayRecord, ...] = ()
    training: TrainingStepRecord | None = None
    findings: tuple[Finding, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    events: tuple[EventRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One prompt to its end.

    `declared` describes the mask that was meant (a preset's rule), and, under the keys of
    `flexinspect.records.prompt`, the pieces that were declared and the special tokens there are. `model`
    names one of the manifest's `models`; it is empty where there is one model alone.
    """

    generation: int
    sample_id: str
    mask: str
    positions: str
    segments: tuple[Segment, ...]
    tokens: tuple[TokenRecord, ...]
    expected: tuple[str, ...] = ()
    declared: Mapping[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
    model: str = ""


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """A line of decoding that leaves another one: its first own step is `fork_step`.

    `change` says what is other in it. Its "kind" is "token": another token was chosen at
    `fork_step` ("token_id", "text", and "instead_id", "instead_text" of the parent; "token_ids" of
    several); "mask": "edits" as text, "rule" in words, "declared" as a declaration has it,
    "changed_rows": how many rows of earlier steps are other ones, "recomputed": whether all keys
    were computed anew; or "replay": a restored state did not go on as recorded ("why": sentences).
    `recomputed` is true when the first own step feeds the whole sequence.
    """

    generation: int
    branch: int
    parent: int
    fork_step: int
    change: Mapping[str, Any]
    segments: tuple[Segment, ...] = ()
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """How a generation, or a branch of it, ended: `state` in finished, interrupted, failed."""

    generation: int
    state: str
    answer: str
    segments: tuple[Segment, ...]
    stop_reason: str = ""
    ended_at: float = 0.0
    branch: int = 0
