"""What the findings about the cache stand for, and what to do about each."""

from __future__ import annotations

from collections.abc import Mapping

from flexinspect.records.finding import Severity
from flexinspect.rules.engine import FindingKind

EMPTY_LAYER = "cache.empty-layer"
CACHE_LOST = "cache.lost"
CACHE_NOT_USED = "cache.not-used"
NO_CACHE_EVENT = "no-cache"
"""The event of a generation whose caller gave use_cache=False."""
EMPTY_SLOTS = "cache.empty-slots"
STALE_SLOTS = "cache.stale-slots"
CACHE_DUPLICATED = "cache.duplicated"
CACHE_SHARED = "cache.shared"

CACHED_PROMPT_EVENT = "cached-prompt"
"""Kind of the event with the tokens that a caller of `generate` says are cached."""

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
        "a layer that was given a cache and stored nothing in it",
        why="From the next step on this layer sees its newest rows alone, as if the text began "
        "there; the answer degrades without any error.",
        confirm="Panel path: keys per layer at the first decode step; cached_after per layer in "
        "the table inputs.",
        fix="Hand past_key_values on under the name that this version of transformers uses; a "
        "catch-all **kwargs swallows the new name in silence.",
        query=_CACHE_QUERY,
    ),
    CACHE_LOST: FindingKind(
        Severity.ERROR,
        "cached keys that are gone, or that a step does not see any more",
        why="What is computed from here on does not depend on the text before it.",
        confirm="Panel path: keys per layer from step to step; they should grow by the rows fed.",
        fix="Keep the cache that a forward returns and pass it to the next one, in each layer; "
        "look at forwards that take another way when q length is 1.",
        query=_CACHE_QUERY,
    ),
    CACHE_NOT_USED: FindingKind(
        Severity.WARNING,
        "the whole sequence computed anew in each step",
        why="The time of a step grows with the length, and that of the whole with its square (and "
        "more); the numbers are the same as with a cache.",
        confirm="q_len in the table steps: it grows by one, while with a cache it is 1.",
        fix="Pass use_cache=True and feed the newest token alone with the cache; the mask of a "
        "decode step is then one row.",
        query=_CACHE_STEPS_QUERY,
    ),
    EMPTY_SLOTS: FindingKind(
        Severity.ERROR,
        "cache slots that were never filled take part in the softmax",
        why="A key of zeros scores 0, not minus infinity: it takes weight, brings a value of "
        "zeros, and the output shrinks; the more, the larger the cache.",
        confirm="Panel mask at this step: the newest row is open beyond the filled length.",
        fix="Close the mask from the filled length on (kv_idx < filled), or slice keys and values "
        "to it.",
        query=_SLOTS_QUERY,
    ),
    STALE_SLOTS: FindingKind(
        Severity.ERROR,
        "cache slots beyond the filled length are seen, with keys of an earlier text",
        why="The newest row attends to keys that are no part of this text, at places that it has "
        "not reached yet.",
        confirm="Panel mask at this step: the newest row is open beyond the filled length.",
        fix="Close the mask from the filled length on; reset a static cache before the next "
        "prompt.",
        query=_SLOTS_QUERY,
    ),
    CACHE_DUPLICATED: FindingKind(
        Severity.ERROR,
        "keys that are in the cache more than once",
        why="Every later row divides its attention among copies, at positions that are not those "
        "of the text.",
        confirm="cached_before and cached_after in the table inputs against the rows fed; the "
        "tokens panel shows what was fed twice.",
        fix="After the prompt feed the chosen token alone, and update the cache once per layer and "
        "forward.",
        query=_CACHE_QUERY,
    ),
    CACHE_SHARED: FindingKind(
        Severity.ERROR,
        "a cache that holds another text than the one that goes on with it",
        why="The answer depends on a prompt that is not part of this one: results change with the "
        "order in which samples are run.",
        confirm="Tokens panel of this generation and of the one before; run this prompt alone and "
        "compare.",
        fix="Make a new cache for each prompt (or reset() it), or crop it to what both prompts "
        "have in common.",
        query=_CACHE_TOKENS_QUERY,
    ),
}
