"""The tables of a step: what was fed, what ran, and what came of it."""

from __future__ import annotations

from flexinspect.trace.columns import define_table

STEPS = define_table(
    "steps",
    "generation branch step",
    "One forward: 0 is the prefill. The columns from `entropy` on describe the distribution of the "
    "newest row (natural logarithms) and are NULL, `chosen_id` too, when no logits were captured.",
    """
    generation      int    the generation
    branch          int    the branch
    step            int    number of the forward, from 0
    phase           text   prefill or decode; train for an optimizer step
    q_len           int    rows fed
    kv_before       int    keys in the cache before
    kv_after        int    keys in the cache after
    started_at      real   seconds since the epoch
    wall_ms         real   milliseconds of the forward with the choice of the token
    capture_ms      real   milliseconds of it that capture took
    first_pos       int?   lowest position this step chose, NULL when none
    last_pos        int?   highest position this step chose
    entropy         real   entropy in nats
    margin          real   logit of the best minus the second
    chosen_id       int?   the chosen token, -1 when the choice was not seen
    chosen_rank     int?   its rank, from 0; -1 when the choice was not seen
    chosen_logprob  real   its log-probability
    n_nan           int?   NaN among the logits
    n_inf           int?   infinities among the logits
    histogram_min   real   lower end of the histogram, a logit
    histogram_max   real   upper end of the histogram, a logit
    histogram       json?  counts in equal bins, a list of integers
    """,
)

CANDIDATES = define_table(
    "candidates",
    "generation branch step rank",
    "The top-k tokens of a step.",
    """
    generation     int   the generation
    branch         int   the branch
    step           int   the step
    rank           int   rank by logit, from 0
    token_id       int   id in the vocabulary
    text           text  the token decoded alone
    logit          real  before the logits processors
    logprob        real  log-probability before the processors
    score          real  after the processors, NULL when that was not seen
    score_logprob  real  log-probability after the processors
    """,
)

INPUTS = define_table(
    "inputs",
    "generation branch step",
    "What a step was fed beside its tokens, and what the cache held around it: a number per layer, "
    "-1 for one that counts no keys; none without a cache.",
    """
    generation     int   the generation
    branch         int   the branch
    step           int   the step
    batch          int   sequences fed
    positions      json  position ids of row 0, runs [first, how many]; empty if none were handed on
    cached_before  json  keys in each layer's cache before, a list of integers
    cached_after   json  keys in each layer's cache after, a list of integers
    """,
)

CALLS = define_table(
    "calls",
    "generation branch step call",
    "Attention calls, in the order they ran.",
    """
    generation  int    the generation
    branch      int    the branch
    step        int    the step
    call        int    number within the step, from 0
    layer       int    the layer
    path        text   what ran: flex uncompiled, flex compiled, sdpa, eager or other
    backend     text   the name under which it was dispatched
    mask        text?  fingerprint of the mask received, NULL when the layer got none
    batch       int    sequences
    q_heads     int    query heads
    kv_heads    int    key and value heads
    q_len       int    rows
    kv_len      int    keys
    head_dim    int    width of a head
    dtype       text   type of the queries
    scale       real?  factor on the scores, NULL when the call left it to the kernel
    gate        real?  largest deviation from 1 of the newest row's mass, NULL if not computed
    gate_kind   text?  how the gate was computed: lse or output
    softcap     real?  cap on the scores, NULL when there is none
    handed      text?  mask that the layer was given, NULL when its kernel got the same
    swallowed   text?  exception that the call made up for, NULL when there was none
    causal      int?   1 when the layer calls itself causal, 0 when not, NULL when it does not say
    window      int?   keys that its sliding window holds, NULL without one
    """,
)

BUILDS = define_table(
    "builds",
    "generation branch step build",
    "Block masks that were built for a step, in the order they were; own code only.",
    """
    generation   int    the generation
    branch       int    the branch
    step         int    the step
    build        int    number within the step, from 0
    layer        int?   the layer in whose forward it was built, NULL outside of them
    batch        int?   sequences of the grid, NULL when one serves all
    heads        int?   heads of the grid, NULL when one serves all
    q_len        int    rows
    kv_len       int    keys
    rule         text   module and qualified name of the rule
    wall_ms      real   how long it took
    peak_growth  int    bytes by which it raised the peak memory of the process or the GPU
    """,
)

LAYER_STATS = define_table(
    "layer_stats",
    "generation branch step number",
    "Statistics of module outputs over the rows of a step, in the order captured.",
    """
    generation  int   the generation
    branch      int   the branch
    step        int   the step
    number      int   number within the step, from 0
    layer       int   the layer
    module      text  the module, within the layer
    n_nan       int   NaN values
    n_inf       int   infinite values
    min         real  smallest value
    max         real  largest value
    mean        real  mean
    std         real  standard deviation
    norm        real  Euclidean norm
    bad_row     int?  first row of the step with a NaN or infinity, NULL when there is none
    """,
)

MEMORY = define_table(
    "memory",
    "generation branch step",
    "Memory at the end of a step.",
    """
    generation      int   the generation
    branch          int   the branch
    step            int   the step
    rss             int   resident set of the process, bytes
    model           int   parameters and buffers, bytes
    kv_cache        int   keys and values held, bytes
    cuda_allocated  int?  allocated by the CUDA allocator, bytes, NULL without CUDA
    cuda_reserved   int?  reserved by the CUDA allocator, bytes
    cuda_peak       int?  peak allocated, bytes: in this step, in training so far
    """,
)

GRADS = define_table(
    "grads",
    "generation branch step name",
    "Gradients per parameter: of the token that a step generated (see `gradients`), or of a "
    "training step (of all parameters or of those that mattered).",
    """
    generation  int   the generation
    branch      int   the branch
    step        int   the step
    name        text  qualified name of the parameter
    norm        real  Euclidean norm of the gradient
    max         real  largest absolute value, NULL when not measured
    n_nan       int   NaN values
    n_inf       int   infinite values
    layer       int?  its layer, NULL for what belongs to none
    part        text?  embedding, q, k, v, qkv, o, attention, mlp, norm, lm_head, tied or other
    """,
)

GRADIENTS = define_table(
    "gradients",
    "generation branch step",
    "What the gradients of a generated token are of, and whether their forward is what ran.",
    """
    generation   int   the generation
    branch       int   the branch
    step         int   the step that generated the token
    token_id     int   the token
    target       text  logprob, or margin to the next best token
    value        real  what was differentiated
    scale        real  norm of its gradient at the logits
    path         text  dense reference, flex or flex compiled
    gate         real  largest difference to the recorded logits, as a share of the largest of them
    tolerance    real  the gate above which this is not what ran, and nothing else is recorded
    wall_ms      real  what it took
    rival        int?  the token that a margin is to
    n_unreached  int   parameters that have no part in the token
    anomaly      text?  what autograd's anomaly mode said, with the traceback of the forward
    """,
)

MASKS = define_table(
    "masks",
    "generation branch step fingerprint",
    "Masks as received, once per fingerprint, under the step that had it first. Cells and block "
    "tables are in `arrays`, owned by the fingerprint.",
    """
    generation   int    generation that had it first
    branch       int    branch that had it first
    step         int    step that had it first
    fingerprint  text   identity of the mask, unique in the trace
    kind         text   block, bool or float
    batch        int    sequences it is made for
    heads        int    heads it is made for
    q_len        int    rows
    kv_len       int    keys
    q_offset     int    position of row 0 in the sequence
    kv_offset    int    position of key 0, above 0 once a sliding cache has dropped keys
    block_q      int?   rows per block, NULL for dense masks
    block_kv     int?   keys per block
    rule         text?  module and qualified name of the rule
    rule_source  text?  file and line of the rule
    compiled     bool   1 when the kernel that honoured it was compiled
    """,
)

ARRAYS = define_table(
    "arrays",
    "generation branch step number chunk",
    "Wide facts, cut in chunks of at most 1 MiB.",
    """
    generation  int    the generation
    branch      int    the branch
    step        int    the step
    number      int    number of the array within the step, from 0
    chunk       int    number of the chunk within the array, from 0
    stream      text   what it is, see the streams
    layer       int?   the layer, NULL when the array holds all or none
    owner       text?  fingerprint of the mask it belongs to, NULL for an array of the step
    dtype       text   true type of the elements
    item        text   type of the stored elements: dtype, but uint16 for bfloat16
    shape       json   lengths of the axes, a list of integers
    codec       text   raw, bits or bits+zstd
    checksum    int    CRC-32 of data, as zlib computes it
    data        blob   the bytes of this chunk
    """,
    clustered=False,
)

STREAMS = {
    "mask.cells": "bool (heads, rows, keys): the executed mask; heads is 1 when all share it",
    "mask.averaged": "bool (heads, rows): rows closed by the lowest float: averaged over all",
    "mask.partial": "bool (heads, row blocks, key blocks): blocks where the rule is applied",
    "mask.full": "bool (heads, row blocks, key blocks): blocks taken whole, without the rule",
    "mask.ruled": "uint8 (heads, row blocks, key blocks): the rule opens 0 nothing, 1 some, 2 all",
    "attention.mass": "float (layers, heads, segments): attention of the newest row by segment",
    "attention.lse": "float (layers, heads): log-sum-exp of the newest row's scores, natural",
    "attention.entropy": "float (layers, heads): entropy of the newest row's attention, nats",
    "attention.slots": "float (layers, 5): where the newest row sees slots that hold nothing of "
    "its text: open keys, all-zero ones and their weight, stale ones and theirs",
    "logits.row": "float (vocabulary): the newest row's logits, before processors; level extreme",
    "inputs.ids": "int (sequences, rows): token ids fed, of a batch of several",
    "inputs.positions": "int (sequences, rows): position ids, of a batch where they may differ",
    "inputs.mask": "bool (sequences, keys): the 2D attention mask fed to an empty cache",
    "q": "(heads, rows, head width): queries of one layer, after rotation, rows of this step",
    "k": "(key heads, rows, head width): keys of one layer, after rotation, rows of this step",
    "v": "(key heads, rows, head width): values of one layer, rows of this step",
    "hidden": "(rows, width): output of one layer, rows of this step",
    "grads.tokens": "float (2, positions): gradient times input, and norm of the gradient, at each "
    "token's embedding",
    "grads.layers": "float (layers + 1,): norm of the gradient at the embeddings and at each "
    "layer's output, 0 where none arrives, NaN for layers without attention",
}
"""Streams that have a meaning here; hooks may add names of their own."""
