"""The tables of a run and its generations: what was asked for, in which words, with what end."""

from __future__ import annotations

from flexinspect.trace.columns import define_table

RUN = define_table(
    "run",
    "key",
    "The manifest: what would be needed to run it again. `state` is one of recording, finished, "
    "interrupted, failed.",
    """
    key    text  name of the fact
    value  json  the fact
    """,
)

GENERATIONS = define_table(
    "generations",
    "generation",
    "One prompt to its end.",
    """
    generation  int   number, from 0
    sample_id   text  the sample of the data set
    mask        text  name of the mask preset or rule that was asked for
    positions   text  position ids: contiguous or reset
    expected    json  the answers that count as right, a list of strings
    declared    json  the mask, the pieces and the special tokens that were meant, an object
    started_at  real  seconds since the epoch
    model       text  its model, by name in the manifest's list `models`; empty for the only one
    """,
)

BRANCHES = define_table(
    "branches",
    "generation branch",
    "One line of decoding in a generation; 0 is the first, a fork has a parent.",
    """
    generation   int   the generation
    branch       int   number within the generation, from 0
    parent       int?  the branch it was forked from, NULL for branch 0
    fork_step    int?  its first own step, NULL for branch 0
    state        text  recording, finished, interrupted or failed
    answer       text  the generated text, empty until the end
    stop_reason  text  why decoding ended, empty until the end
    started_at   real  seconds since the epoch
    ended_at     real?  seconds since the epoch, NULL until the end
    change       json   what made it differ from its parent, an object; empty for branch 0
    """,
)

SEGMENTS = define_table(
    "segments",
    "generation branch segment",
    "Spans of the sequence.",
    """
    generation  int   the generation
    branch      int   the branch
    segment     int   number within the sequence, from 0
    start       int   first position
    stop        int   position after the last; of the generated one the highest it may reach
    label       text  name for people
    kind        text  bos, shared, paraphrase, separator, cue or generated
    owner       int   the segment it belongs to for masking, itself but for separators
    """,
)

TOKENS = define_table(
    "tokens",
    "generation branch pos",
    "Positions of the sequence, prompt and generated.",
    """
    generation   int   the generation
    branch       int   the branch
    pos          int   position in the sequence, from 0
    token_id     int   id in the vocabulary
    token        text  the vocabulary's own string
    text         text  the token decoded alone
    position_id  int   position id that was fed
    segment      int   number of its segment
    special      bool  1 for BOS, EOS and the like
    step         int?  the step that chose it, NULL in the prompt
    """,
)
