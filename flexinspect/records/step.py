"""The records of a trace: frozen dataclasses, the contract between capture, trace and views.

Records hold data only: no I/O, no torch. Every record of a step is reached through `StepRecord`;
only the step has generation and branch. Times are seconds since the epoch (`*_at`) or milliseconds
(`*_ms`), sizes are bytes, positions count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from flexinspect.records.finding import Finding, Repeat
from flexinspect.records.prompt import Segment
from flexinspect.records.training_step import TrainingStepRecord

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    # The process of the user's program must not import numpy before the program does: numpy reads
    # its environment variables once.
    Array = Any

LEVELS = ("basic", "advanced", "extreme")
UNKNOWN = -1
"""The `chosen_id` and `chosen_rank` of a step whose chosen token was not observed."""
STANDALONE_CALLS = "calls outside of a model"
"""Beginning of the `sample_id` of a generation that is a standalone call of FlexAttention."""
STANDALONE_RAISED = "a call outside of a model that raised"
"""The `sample_id` of a generation that is a standalone call which raised."""
STANDALONE_MASKS = "masks built, and no call after them"
"""The `sample_id` of a generation that holds only block masks which were built."""
TRAIN = "train"
"""The phase of an optimizer step; the other phases are those of generation."""
PATHS = ("flex uncompiled", "flex compiled", "sdpa", "eager", "other")
OWN_FUNCTION = "other"
"""The path of an attention function of the program that calls no known kernel: what it masks by
itself is not recorded."""
UNKNOWN_PATH = "unknown"
"""The path of a call in an imported trace, whose source does not say which kernel ran."""
INFERRED_MASK = "inferred"
"""The kind of a causal mask that an imported trace does not hold as such: the layer received none,
and under this one the recorded queries, keys and values give its recorded output."""
MASK_ARRAYS = ("cells", "uniform_rows", "partial", "full", "mask_mod_blocks")
"""The fields of `MaskRecord` that hold arrays, in the order they are stored."""
GRADIENT_TARGETS = ("logprob", "margin")
PARAMETER_PARTS = (
    *("embedding", "q", "k", "v", "qkv", "o", "attention", "mlp", "norm", "lm_head", "tied"),
    "other",
)
"""Groups of parameters; "tied" is an embedding that is also the output head."""


class TokenRecord(Struct, frozen=True):
    """One position of the sequence.

    `token` is the string in the vocabulary. `text` is what the token adds to the decoded text, so
    that all texts joined are the decoded sequence (a token that ends inside of a character adds
    nothing). `step` is the step that chose it (None in the prompt). `special` marks special tokens
    such as BOS and EOS.
    """

    pos: int
    token_id: int
    token: str
    text: str
    position_id: int
    segment: int
    special: bool = False
    step: int | None = None


class Candidate(Struct, frozen=True):
    """One of the top-k tokens of a step.

    `logit` and `logprob` are before the logits processors, the scores after them. The scores are
    NaN when the output of the processors was not observed.
    """

    rank: int
    token_id: int
    text: str
    logit: float
    logprob: float
    score: float
    score_logprob: float


class LogitsRecord(Struct, frozen=True):
    """The distribution of the newest row, with natural logarithms.

    `margin` is the best logit minus the second best. `chosen_rank` counts from 0; it and
    `chosen_id` are `UNKNOWN`, and `chosen_logprob` is NaN, when the chosen token was not observed.
    `histogram` counts the logits in equal bins between `histogram_min` and `histogram_max`.
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


class CallRecord(Struct, frozen=True):
    """One attention call of one layer in one step.

    `path` is one of `PATHS` or `UNKNOWN_PATH`, `backend` the name under which transformers
    dispatched it (empty when unknown), `mask` the fingerprint of the received mask (None when the
    kernel received no mask, or it is unknown as the path is). `lse_error` is the result of the LSE
    check: the largest deviation from 1, over heads, of the newest row's attention
    summed over the executed mask (None when it was not computed); `check_kind` is how it was
    computed: "lse" or "output". A `softcap` c replaces each scaled score by c * tanh(score / c),
    before the mask. `causal` is the layer's own `is_causal` (None when it has none), `window` the
    number of keys in its sliding window (None without one). Only for user code:
    `mask_passed_to_layer` describes the mask passed to the layer (None when its kernel received the
    same), and `suppressed_exception` the exception of the call that was suppressed (None when there
    was none).
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
    lse_error: float | None = None
    check_kind: str | None = None
    softcap: float | None = None
    mask_passed_to_layer: str | None = None
    suppressed_exception: str | None = None
    causal: bool | None = None
    window: int | None = None


class BuildRecord(Struct, frozen=True):
    """A block mask that was built, with its cost; `layer` is None outside of all layers.

    `batch` and `heads` are None where one mask serves all. `peak_growth` is the growth of the peak
    memory in bytes, of the process or the GPU; memory below an earlier peak does not show.
    """

    layer: int | None
    batch: int | None
    heads: int | None
    q_len: int
    kv_len: int
    mask_mod: str
    wall_ms: float
    peak_growth: int


class InputsRecord(Struct, frozen=True):
    """The forward input of a step apart from its tokens, and the lengths of the cache.

    `positions` are the position ids of batch row 0 as runs (first, length) of consecutive ids;
    empty when the layers received none. `cached_before` and `cached_after` are the number of cached
    keys per layer, -1 for a layer whose cache has no length; empty without a cache.
    """

    batch: int
    positions: tuple[tuple[int, int], ...] = ()
    cached_before: tuple[int, ...] = ()
    cached_after: tuple[int, ...] = ()

    @property
    def position_ids(self) -> list[int]:
        """The position ids as a list."""
        return [id_ for first, n in self.positions for id_ in range(first, first + n)]


class LayerStatRecord(Struct, frozen=True):
    """Statistics of one module's output in one step, over the rows of that step.

    `bad_row` is the first of these rows with NaN or Inf, None when there is none.
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


class MemoryRecord(Struct, frozen=True):
    """Memory in bytes at the end of a step; CUDA figures are None without CUDA."""

    rss: int
    model: int
    kv_cache: int
    cuda_allocated: int | None = None
    cuda_reserved: int | None = None
    cuda_peak: int | None = None


class GpuRecord(Struct, frozen=True):
    """What NVML says of a GPU, read at most a few times a second; None or NaN where it cannot tell.

    `utilization` is the share of the last sample period in which a kernel ran, in percent.
    `memory_used` and `memory_total` are bytes of the device, `memory_own` those of this process,
    `processes` the (process id, bytes) of all that hold memory. `power` is in watts.
    """

    device: int
    name: str
    utilization: float
    memory_used: int
    memory_total: int
    memory_own: int | None = None
    temperature: int | None = None
    power: float | None = None
    processes: tuple[tuple[int, int], ...] = ()

    @property
    def memory_other(self) -> int | None:
        """Bytes that other processes (and the driver) hold, None where the own part is unknown."""
        return None if self.memory_own is None else max(self.memory_used - self.memory_own, 0)


class LensRecord(Struct, frozen=True):
    """The logit lens of one layer: final norm and output head on its newest row.

    The best tokens come first. `chosen_rank` and `chosen_logprob` are those of the token that the
    step chose (-1 and NaN if it is unknown). `error` is how far the lens of the last layer is from
    the model's own logits, as the largest difference of a log-probability; None for other layers.
    """

    layer: int
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    chosen_rank: int
    chosen_logprob: float
    error: float | None = None


class MaskRecord(Struct, frozen=True):
    """A mask as a layer received it, stored once per fingerprint.

    `kind` is "block" (BlockMask), "bool" or "float" (dense tensor), "none", "none, causal" (no
    mask, on a path that is causal by itself), "score_mod" (no mask, but a score_mod that closes
    cells, which `mask_mod` names then), or `INFERRED_MASK`. `q_offset` is the position of row
    0 in the sequence, `kv_offset` that of key 0 (above 0 once a sliding cache has dropped keys).
    `mask_mod` has its module and qualified name, `mask_mod_source` its file and first line where
    known, and `mask_mod_code` the variables that it reads, see docs/trace-format.md. `heads` is the
    number of heads that the mask was built for; the mask_mod of a mask built for 1 head may still
    depend on the head. `added` describes what a float mask adds to some open cells, and 0 to the
    others: the `lowest` and `highest` value below 0, the number of their `cells`, and the `first`
    one with the lowest (head, row and key). It is None where nothing is added, where any value is
    above 0, and where the values differ by more than 0.001, as those of a bias by distance do.

    Arrays, all of batch 0, are None when they were not evaluated:

    * `cells`, bool (heads, n_q, n_kv): the executed mask per query head, or with 1 head when all
      share it. A bool mask that was added to the scores (eager attention) closes no cell.
    * `uniform_rows`, bool (1 or heads, n_q): rows of a float mask with its lowest float in every
      cell, None if there are none. They should be closed, but softmax gives all their keys the
      same weight, so `cells` has them open.
    * `partial` and `full`, bool (heads, row blocks, key blocks): the block tables. `full` is None
      when no block is full; both are None at level basic for a decode row.
    * `mask_mod_blocks`, uint8 (1 or heads, row blocks, key blocks): what the mask_mod alone opens
      of each block: 0 nothing, 1 some, 2 all of its cells. Only for compiled calls, whose `cells`
      follow the block tables.
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
    mask_mod: str | None = None
    mask_mod_source: str | None = None
    compiled: bool = False
    mask_mod_code: Mapping[str, Any] | None = None
    added: Mapping[str, Any] | None = None
    cells: npt.NDArray[np.bool_] | None = None
    uniform_rows: npt.NDArray[np.bool_] | None = None
    partial: npt.NDArray[np.bool_] | None = None
    full: npt.NDArray[np.bool_] | None = None
    mask_mod_blocks: npt.NDArray[np.uint8] | None = None


class ArrayRecord(Struct, frozen=True):
    """An array of a step, for instance stream "attention.mass", float (layers, heads, segments).

    `layer` is None when the array holds all layers. `dtype` names the true type when numpy has
    none for it ("bfloat16", stored as uint16), otherwise it is None.
    """

    stream: str
    array: Array
    layer: int | None = None
    dtype: str | None = None


GPU_EVENT, LENS_EVENT, SPARSE_LENS_EVENT = "gpu", "logit-lens-off", "logit-lens-sparse"
"""Kinds of events that say why there are no GPU figures, no logit lens, or not in each step."""


class EventRecord(Struct, frozen=True):
    """An event of a run: a phase ("loading"), a hook switched off, an error, a warning."""

    kind: str
    text: str
    at: float
    generation: int | None = None
    step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


class OutputRecord(Struct, frozen=True):
    """A piece of printed output as it arrived: `stream` is "stdout" or "stderr".

    `generation` and `step` are those of the last step that had started when it was read (None
    before the first). Bytes that are not UTF-8 are replaced in `text`.
    """

    stream: str
    text: str
    at: float
    generation: int | None = None
    step: int | None = None


class StepRecord(Struct, frozen=True):
    """Everything recorded of one forward of a generation: one transaction of the trace.

    `tokens` are the tokens that this step chose, `masks` only those with a new fingerprint.
    `wall_ms` is the time of the forward and the choice of the token, `capture_ms` the part of it
    that capture took. `repeats` are repetitions of earlier findings; they are stored as counts of
    those findings, so that a step that is read back has none. `training` is set for a training step
    (phase "train").
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
    gpus: tuple[GpuRecord, ...] = ()
    lens: tuple[LensRecord, ...] = ()
    masks: tuple[MaskRecord, ...] = ()
    arrays: tuple[ArrayRecord, ...] = ()
    training: TrainingStepRecord | None = None
    findings: tuple[Finding, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    events: tuple[EventRecord, ...] = ()


class GenerationRecord(Struct, frozen=True):
    """One prompt to its end.

    `declared` describes the declared mask (for instance the rule of a preset), and, under the keys
    `DECLARED_SEGMENT_KEYS` of `flexinspect.records.prompt`, declared segments and special tokens.
    `model` names one of the manifest's `models`; it is empty if there is only one model.
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


class BranchRecord(Struct, frozen=True):
    """A branch of a generation that leaves its `parent`: its first own step is `fork_step`.

    `change` describes the difference from the parent. Its "kind" is one of

    * "token": another token was chosen at `fork_step` ("token_id", "text", and "instead_id",
      "instead_text" of the parent; "token_ids" for several tokens),
    * "mask": "edits" as text, "mask_mod" in words, "declared" as in a declaration, "changed_rows"
      (the number of rows of earlier steps that differ), "recomputed" (whether all keys were
      recomputed),
    * "replay": a restored state did not continue as recorded ("why": sentences).

    `recomputed` is true when the input of the first own step is the whole sequence.
    """

    generation: int
    branch: int
    parent: int
    fork_step: int
    change: Mapping[str, Any]
    segments: tuple[Segment, ...] = ()
    recomputed: bool = False


def forced_tokens(
    branch: int, fork_step: int | None, change: Mapping[str, Any]
) -> set[tuple[int, int]]:
    """Return branch and step of the tokens that the user chose for a branch; see `BranchRecord`."""
    if change.get("kind") != "token" or fork_step is None:
        return set()
    n_tokens = len(change.get("token_ids") or (None,))
    return {(branch, step) for step in range(fork_step, fork_step + n_tokens)}


class GenerationEnd(Struct, frozen=True):
    """The end of a generation or of a branch: `state` is finished, interrupted or failed."""

    generation: int
    state: str
    answer: str
    segments: tuple[Segment, ...]
    stop_reason: str = ""
    ended_at: float = 0.0
    branch: int = 0


class GradientStat(Struct, frozen=True):
    """The gradient of one parameter: its Euclidean norm, largest absolute value, NaN and Inf.

    `layer` is None outside of all layers; `part` is one of `PARAMETER_PARTS`.
    """

    name: str
    norm: float
    max: float
    n_nan: int
    n_inf: int
    layer: int | None = None
    part: str | None = None


class GradientRecord(Struct, frozen=True):
    """Gradients of one generated token: of its log-probability, or of its margin to the next best.

    They come from a separate forward over the whole sequence before the token, without a cache.
    `value` is the differentiated quantity, `scale` the norm of its gradient at the logits,
    `runner_up_id` the other token id of a margin. `logits_error` is the largest difference between
    the logits of this forward and the recorded ones, relative to the largest recorded logit; above
    `tolerance` (or NaN) this forward is not what ran, and nothing else is recorded.

    `n_unreached` parameters have no influence on the token; those of layers that are unreached as a
    whole are in `stats`, with 0. `anomaly` is the message of autograd's anomaly mode. `tokens` is
    float (2, positions): gradient times input, and the norm of the gradient, at each token's
    embedding. `layers` is float (layers + 1,): the norms at the embeddings and at each layer's
    output, 0 where no gradient arrives, NaN for layers without attention.
    """

    generation: int
    step: int
    token_id: int
    target: str
    value: float
    scale: float
    path: str
    logits_error: float
    tolerance: float
    wall_ms: float
    branch: int = 0
    runner_up_id: int | None = None
    n_unreached: int = 0
    anomaly: str | None = None
    stats: tuple[GradientStat, ...] = ()
    tokens: Array | None = None
    layers: Array | None = None

    @property
    def matches_recorded(self) -> bool:
        """Whether the forward of the gradients reproduced the recorded logits."""
        return self.logits_error <= self.tolerance
