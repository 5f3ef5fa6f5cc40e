"""The tables of what is said about a run: by rules, by capture, and by the program itself."""

from __future__ import annotations

from flexinspect.trace.columns import define_table

FINDINGS = define_table(
    "findings",
    "finding",
    "What the rules say.",
    """
    finding     int    number, in order of writing, from 1
    generation  int    the generation
    branch      int    the branch
    step        int?   the step, NULL for the whole generation
    id          text   class of the finding, for instance mask.empty-row
    severity    text   error, warning or note
    sentence    text   what is wrong
    layer       int?   the layer
    head        int?   the head
    positions   json   token positions, a list of integers
    evidence    json   the numbers behind it, an object
    layers      json   all layers it is about where they are several, a list of integers
    series      text   what makes later findings of this id the same one, '' for none
    last_step   int?   the last step in which it was met again, NULL when it was not
    times       int    in how many steps it was met
    why         text   why it matters
    confirm     text   how to see for oneself
    fix         text   what usually mends it
    query       text   the SQL that finds the evidence in this trace
    """,
    clustered=False,
)

REVIEWS = define_table(
    "reviews",
    "rule generation",
    "Which rules looked at a generation after it was recorded; their findings are in findings.",
    """
    rule        text  name of the rule
    generation  int   the generation
    at          real  seconds since the epoch
    wall_ms     real  milliseconds that it took
    """,
)

EVENTS = define_table(
    "events",
    "event",
    "What happened around the steps: phases, warnings, hooks switched off.",
    """
    event       int   number, in order of writing, from 1
    generation  int?  the generation, NULL outside of one
    branch      int?  the branch, NULL outside of a step
    step        int?  the step, NULL outside of one
    kind        text  class of the event, for instance loading
    text        text  what happened
    at          real  seconds since the epoch
    data        json  details, an object
    """,
    clustered=False,
)

OUTPUT = define_table(
    "output",
    "number",
    "What the program printed, in the order it came; of very much, the beginning and the end.",
    """
    number      int   number, in order of coming, from 1
    generation  int?  generation of the last step begun by then, NULL before the first
    step        int?  that step
    stream      text  stdout or stderr
    at          real  seconds since the epoch
    text        text  what was printed, bytes that are not UTF-8 replaced
    """,
    clustered=False,
)
