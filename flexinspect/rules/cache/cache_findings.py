"""The finding kinds of the family `cache`: meaning, reason, check, fix and query of each id."""

from __future__ import annotations

from collections.abc import Mapping

from flexinspect.records.finding import Severity
from flexinspect.rules.engine import FindingKind

EMPTY_LAYER = "cache.empty-layer"
CACHE_LOST = "cache.lost"
CACHE_NOT_USED = "cache.not-used"
NO_CACHE_EVENT = "no-cache"
"""Event of a generation with use_cache=False."""
EMPTY_SLOTS = "cache.empty-slots"
STALE_SLOTS = "cache.stale-slots"
CACHE_DUPLICATED = "cache.duplicated"
CACHE_SHARED = "cache.shared"

CACHED_PROMPT_EVENT = "cached-prompt"
"""Event with the prompt tokens that a caller of `generate` assumes to be cached."""

_CACHE_QUERY = (
    "SELECT i.step, i.cached_before, i.cached_after, c.layer, c.kv_len FROM inputs i "
    "LEFT JOIN calls c USING (generation, branch, step) WHERE i.generation = {generation} "
    "AND i.branch = {branch} AND i.step = {step} ORDER BY c.layer"
)
_CACHE_TOKENS_QUERY = (
    "SELECT pos, token_id, text, position_id, step FROM tokens "
    "WHERE generation = {generation} AND branch = {branch} ORDER BY pos"
)
_CACHE_STEPS_QUERY = (
    "SELECT step, phase, q_len, kv_before, kv_after FROM steps "
    "WHERE generation = {generation} AND branch = {branch} ORDER BY step"
)
_SLOTS_QUERY = (
    "SELECT c.layer, c.kv_len, s.kv_after, a.shape, a.data FROM arrays a "
    "JOIN steps s USING (generation, branch, step) JOIN calls c USING (generation, branch, step) "
    "WHERE a.generation = {generation} AND a.branch = {branch} AND a.step = {step} "
    "AND a.stream = 'attention.slots' ORDER BY c.layer"
)

CACHE_KINDS: Mapping[str, FindingKind] = {
    EMPTY_LAYER: FindingKind(
        Severity.ERROR,
        "a layer that received a cache and stored nothing in it",
        why="From the next step on this layer attends only to its newest rows, as if the text "
        "began there. The answer degrades without an error.",
        confirm="Check the keys per layer at the first decode step in the path panel, or "
        "cached_after in the table inputs.",
        fix="Pass past_key_values on under the name that this version of transformers uses; "
        "**kwargs accepts a wrong name without an error.",
        query=_CACHE_QUERY,
    ),
    CACHE_LOST: FindingKind(
        Severity.ERROR,
        "cached keys are lost, or a step no longer attends to them",
        why="From here on the output does not depend on the text before.",
        confirm="Check the keys per layer in the path panel: each step should add its number of "
        "rows.",
        fix="Pass the cache that a forward returns to the next one, in every layer. Check forwards "
        "with a separate branch for q length 1.",
        query=_CACHE_QUERY,
    ),
    CACHE_NOT_USED: FindingKind(
        Severity.WARNING,
        "every step recomputes the whole sequence",
        why="The time of a step grows with the length, and the total time at least with its "
        "square. The results are the same as with a cache.",
        confirm="q_len in the table steps grows by one per step; with a cache it is 1.",
        fix="Pass use_cache=True, and only the newest token together with the cache. The mask of a "
        "decode step then has one row.",
        query=_CACHE_STEPS_QUERY,
    ),
    EMPTY_SLOTS: FindingKind(
        Severity.ERROR,
        "cache slots that were never filled take part in the softmax",
        why="A key of zeros has score 0, not -Inf: it gets weight and adds a value of zeros, so "
        "the output shrinks; the larger the cache, the more.",
        confirm="In the mask panel at this step, the newest row is open beyond the filled length.",
        fix="Mask all slots beyond the filled length (kv_idx < filled), or slice keys and values "
        "to it.",
        query=_SLOTS_QUERY,
    ),
    STALE_SLOTS: FindingKind(
        Severity.ERROR,
        "rows attend to cache slots beyond the filled length, with keys of an earlier text",
        why="The newest row attends to keys that are not part of this text, at positions that it "
        "has not reached yet.",
        confirm="In the mask panel at this step, the newest row is open beyond the filled length.",
        fix="Mask all slots beyond the filled length, and reset a static cache before the next "
        "prompt.",
        query=_SLOTS_QUERY,
    ),
    CACHE_DUPLICATED: FindingKind(
        Severity.ERROR,
        "keys are in the cache more than once",
        why="Every later row splits its attention between copies, at positions that differ from "
        "those of the text.",
        confirm="Compare cached_before and cached_after in the table inputs with the number of "
        "rows. The tokens panel shows the repeated input.",
        fix="After the prompt pass only the chosen token, and update the cache once per layer and "
        "forward.",
        query=_CACHE_QUERY,
    ),
    CACHE_SHARED: FindingKind(
        Severity.ERROR,
        "the cache holds another text than the one that uses it",
        why="The answer depends on another prompt, so results change with the order of the "
        "samples.",
        confirm="Compare the tokens panels of this generation and the previous one. Run this "
        "prompt alone and compare the result.",
        fix="Create a new cache for each prompt (or reset() it), or crop it to the common prefix "
        "of both prompts.",
        query=_CACHE_TOKENS_QUERY,
    ),
}
