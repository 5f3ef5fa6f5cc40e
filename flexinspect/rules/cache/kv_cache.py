"""The rule for the key-value cache: empty, lost, filled twice, of another prompt, or not used.

The cached lengths are compared with the input and with the number of keys of the attention calls.
Sliding windows, crops after rejected drafts and caches that drop keys by design are not faults.
Capture writes the stream `attention.slots` only if empty or stale slots take part in the softmax.
Its numbers are counted or summed from the keys and weights of the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from flexinspect.core.text import capitalize, format_layers, format_ranges, plural
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import declared_tokenizer
from flexinspect.records.step import CallRecord, EventRecord, InputsRecord, StepRecord
from flexinspect.rules.context import format_step_layers, step_array
from flexinspect.rules.engine import Findings, Rule, finding_kinds

NO_CACHE_EVENT = "cache-disabled"  # event of a generation with use_cache=False
CACHED_PROMPT_EVENT = "cached-prompt"  # has the prompt tokens that a caller assumes to be cached

_MANY_FORWARDS = 6
_MAX_GENERATIONS = 16  # earlier generations whose tokens are compared with a filled cache
_MIN_ANSWER = 2  # decode steps that make an answer
_MIN_COMMON_PREFIX = 8  # equal tokens of a repeated text; templates have a few in common

SLOT_STREAM = "attention.slots"
OPEN_COLUMN, EMPTY_COLUMN, STALE_COLUMN = 0, 1, 3
"""Columns of `attention.slots` (calls, 5): open keys; empty (all-zero) keys; stale keys beyond the
filled length. The column after each of the last two is their weight, a mean over heads."""


class _LayerLengths(NamedTuple):
    """A step with the cached lengths of its layers and its calls by layer."""

    step: StepRecord
    inputs: InputsRecord
    called: Mapping[int, CallRecord]

    def is_blind(self, layer: int) -> bool:
        """Whether the call of a layer sees no keys but those of the step itself."""
        return layer in self.called and self.called[layer].kv_len <= self.step.q_len

    def find_empty(self, held: Mapping[int, int]) -> list[int]:
        """Return the layers that ran and store nothing; `held` are the known lengths."""
        ran = set(self.called) or {stat.layer for stat in self.step.layer_stats}
        none = [n for n, keys in held.items() if keys == 0 and n in ran]
        # A layer that shares the keys of another one stores none, but attends to them.
        if self.step.kv_before:
            none += [n for n in self.called if n >= len(held) and n not in held]
            none = [n for n in none if n not in self.called or self.is_blind(n)]
        return sorted(set(none))

    def name_layers(self, which: Sequence[int]) -> str:
        """Return `Layer 3`, or `All 8 layers`."""
        n_layers = len(self.called) or len(self.inputs.cached_after)
        return capitalize(format_layers(which, n_layers))


class CacheRule(Rule):
    """Follows the cache and its text through the steps and generations of one model.

    In standalone calls only empty slots are checked. If no layer stores anything, each step is a
    generation of its own, and one finding is enough for all of them.
    """

    name = "caches"
    needs = (imported.CACHE,)
    streams = (SLOT_STREAM,)
    handles_standalone_calls = True
    findings = finding_kinds(
        *("cache.duplicated", "cache.empty-layer", "cache.empty-slots", "cache.lost"),
        *("cache.not-used", "cache.shared", "cache.stale-slots"),
    )

    def __init__(self) -> None:
        self._is_always_empty = False
        self._cached_texts: deque[list[int]] = deque(maxlen=_MAX_GENERATIONS)
        """Token ids of the last generations, which may be in a cache."""
        self._last_step: StepRecord | None = None  # of any generation, without its large arrays
        self._n_continued = self._n_tokens_before = 0
        self._is_loss_reported = False

    def reset(self) -> None:
        """Begin a generation; the texts of earlier ones are kept."""
        self._question: tuple[int, int] | None = None
        """Step and position of the newest question, if the first one came after a prefix."""
        self._n_answered = 0
        self._last_cached: tuple[int, ...] = ()
        self._reported_layers: set[int | None] = set()  # those with a finding in this generation
        self._full_forwards: list[tuple[int, int]] = []  # (step, rows), each over the whole text
        self._masks: frozenset[str | None] = frozenset()
        self._declared_ids: list[int] | None = None  # which the caller assumes to be cached
        self._is_cache_off = False
        self._length = 0
        self._repeated: Finding | None = None  # until the next step shows how tokens are chosen

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Store the prompt that the caller assumes to be cached."""
        if event.kind == CACHED_PROMPT_EVENT:
            self._declared_ids = list(event.data["prompt"])
        return ()

    def on_step(self, step: StepRecord) -> Findings:
        """Check the slots, the lengths and the text of the cache at a step."""
        if self._repeated is not None and step.step > 1:
            yield self._judge_repeated(step, self._repeated)
            self._repeated = None
        # The filled length is unknown for keys that a program stores itself.
        is_known = step.inputs is not None and bool(step.inputs.cached_after)
        slots = step_array(step, SLOT_STREAM)
        for column in (EMPTY_COLUMN, STALE_COLUMN) if is_known else (EMPTY_COLUMN,):
            if slots is not None and (slots[:, column] > 0).any():
                yield self._slot_finding(step, slots, column)
        if step.inputs is not None:
            if not self._is_healthy(step, step.inputs):
                called = {call.layer: call for call in step.calls}
                yield from self._check_layers(_LayerLengths(step, step.inputs, called))
            self._last_cached = step.inputs.cached_after
            text_finding = self._check_text(step)
            # If all layers are always empty, the tokens show the same fault.
            if text_finding is not None and not self._is_always_empty:
                yield text_finding

    def on_generation_end(self) -> Sequence[Finding]:
        """Keep the text, and report that each step recomputed the whole sequence."""
        if self.context.is_standalone:
            return ()
        self._cached_texts.append(self._token_ids(0, self._length))
        steps, self._full_forwards = self._full_forwards, []
        if self._repeated is not None:  # no later step shows how tokens are chosen
            return [self._repeated]
        if len(steps) < 3 or not self._is_causal():
            return ()
        rows, (_, first), (last_step, last) = sum(n for _, n in steps), steps[0], steps[-1]
        needed = first + len(steps) - 1
        lengths = ", ".join(str(n) for _, n in steps[:3])
        sentence = (
            f"No cache is used: q length grows {lengths}{', ...' if len(steps) > 3 else ''} to "
            f"{last}; {len(steps)} steps computed {rows} query rows, where {needed} are enough "
            f"with a cache{' (use_cache=False was passed)' if self._is_cache_off else ''}."
        )
        # A few forwards without a cache are usual, for proposals of a draft for example.
        is_short = len(steps) < _MANY_FORWARDS
        severity = Severity.NOTE if self._is_cache_off or is_short else None
        evidence = {"steps": len(steps), "rows": rows, "needed": needed, "first": first}
        evidence["last"] = last
        found = self.finding(None, "cache.not-used", sentence, severity=severity, evidence=evidence)
        return [replace(found, step=steps[1][0], last_step=last_step, times=len(steps) - 1)]

    def _is_healthy(self, step: StepRecord, inputs: InputsRecord) -> bool:
        """Whether all layers hold the same length: the previous one plus the rows of this step."""
        after = inputs.cached_after
        if not after:
            return True
        n, before = after[0], inputs.cached_before
        return (
            n == step.kv_after
            and after.count(n) == len(after)
            and len(before) in (0, len(after))
            and before == (self._last_cached or before)
            and (not step.kv_before or all(call.kv_len > step.q_len for call in step.calls))
        )

    def _check_layers(self, at: _LayerLengths) -> list[Finding]:
        """Report layers that are empty, lost keys, or store keys twice."""
        step, inputs = at.step, at.inputs
        held = {n: keys for n, keys in enumerate(inputs.cached_after) if keys >= 0}
        empty = at.find_empty(held)
        lost = [n for n in self._find_lost(at) if n not in empty]
        before = dict(enumerate(inputs.cached_before))
        twice = [n for n, keys in held.items() if keys - before.get(n, 0) > step.q_len]
        found = []
        if empty:
            found.append(self._empty_finding(at, empty))
        if lost:
            found.append(self._lost_finding(at, lost))
        if twice and (before or not step.kv_before):
            first = twice[0]
            sentence = (
                f"The cache of {format_layers(twice, len(inputs.cached_after))} grew by "
                f"{held[first] - before.get(first, 0)} keys in step {step.step}, which has "
                f"{plural(step.q_len, 'row')}: keys are stored more than once"
            )
            at = at._replace(called={})
            found.append(self._finding(at, "cache.duplicated", sentence, twice))
        is_known = self._is_always_empty
        self._is_always_empty = bool(empty) and not any(held.values())
        if is_known and self._is_always_empty:
            return []
        new = [one for one in found if {*one.layers, one.layer} - self._reported_layers]
        for one in new:
            self._reported_layers |= {*one.layers, one.layer}
        return new

    def _find_lost(self, at: _LayerLengths) -> list[int]:
        """Layers that lost keys, stopped growing, or do not attend to their cached keys."""
        step, inputs = at.step, at.inputs
        if not step.kv_before:
            return []
        blind = [n for n in at.called if at.is_blind(n)]
        pairs = enumerate(zip(inputs.cached_before, inputs.cached_after, strict=False))
        growth = {n: after - before for n, (before, after) in pairs if after >= 0}
        stuck = [n for n, grew in growth.items() if 0 <= grew < step.q_len]
        if max(growth.values(), default=0) != step.q_len:
            stuck = []
        return sorted({*blind, *stuck, *self._find_shrunk(inputs)})

    def _find_shrunk(self, inputs: InputsRecord) -> list[int]:
        """Layers that lost keys since the last step, while others did not."""
        pairs = list(zip(self._last_cached, inputs.cached_before, strict=False))
        shrunk = [n for n, (before, now) in enumerate(pairs) if 0 <= now < before]
        return shrunk if any(before == now > 0 for before, now in pairs) else []

    def _empty_finding(self, at: _LayerLengths, empty: Sequence[int]) -> Finding:
        step, inputs, called = at
        filled = [n for n, keys in enumerate(inputs.cached_after) if keys > 0]
        others = "no layer holds any keys"
        if filled:
            verb = "holds" if len(filled) == 1 else "hold"
            others = f"{format_layers(filled, 0)} {verb} {max(inputs.cached_after)}"
        sentence = f"{at.name_layers(empty)} received a cache and left it empty (0), {others}"
        sees = [called[n].kv_len for n in empty if n in called]
        if step.kv_before and sees:
            attends = "it attends" if len(empty) == 1 else "they attend"
            sentence += f": in step {step.step} {attends} to {plural(max(sees), 'key')} instead of "
            sentence += f"{step.kv_after}"
        return self._finding(at, "cache.empty-layer", sentence, empty)

    def _lost_finding(self, at: _LayerLengths, lost: Sequence[int]) -> Finding:
        step, inputs, called = at
        one, severity = len(lost) == 1, None
        shrunk = set(self._find_shrunk(inputs)) & set(lost)
        if shrunk:
            before, now = (held[min(shrunk)] for held in (self._last_cached, inputs.cached_before))
            what = f"lost keys between steps {step.step - 1} and {step.step}: "
            what += f"the cache held {before} and now holds {now}"
        elif all(map(at.is_blind, lost)):
            seen = plural(called[lost[0]].kv_len, "key")
            what = f"{'attends' if one else 'attend'} to only {seen} in step {step.step}, those of "
            what += f"the step itself; the cache held {step.kv_before} before it"
        else:
            # A cache that drops keys by design looks the same if its layers differ.
            grew, severity = plural(step.q_len, "row"), Severity.WARNING
            what = f"{'does' if one else 'do'} not store the {grew} of step {step.step}: "
            what += f"{'its' if one else 'their'} cache stays at {inputs.cached_after[lost[0]]}, "
            what += f"the other layers hold {max(inputs.cached_after)}"
        sentence = f"{at.name_layers(lost)} {what}"
        return self._finding(at, "cache.lost", sentence, lost, severity=severity)

    def _finding(
        self, at: _LayerLengths, id_: str, sentence: str, which: Sequence[int], **options: Any
    ) -> Finding:
        """Return a finding with the lengths of all layers; `options` are those of `finding`."""
        before, after = list(at.inputs.cached_before), list(at.inputs.cached_after)
        evidence = {"rows": at.step.q_len, "cached_before": before, "cached_after": after}
        evidence["kv_len"] = [call.kv_len for call in at.called.values()]
        options |= {"layers": which, "series": format_ranges(which), "evidence": evidence}
        return self.finding(at.step, id_, f"{sentence}.", **options)

    def _slot_finding(self, step: StepRecord, slots: npt.NDArray[Any], column: int) -> Finding:
        rows = np.flatnonzero(slots[:, column] > 0).tolist()
        weights = {row: float(slots[row, column + 1]) for row in rows}
        worst = max(weights, key=weights.__getitem__)
        n_open, n_bad = int(slots[worst, OPEN_COLUMN]), int(slots[worst, column])
        layers = {step.calls[row].layer for row in rows}
        where, what, most = "", "call", ""
        if not self.context.is_standalone:
            where = f"{capitalize(format_step_layers(layers, step))}, step {step.step}: "
            what = "step"
            most = f" (layer {step.calls[worst].layer})" if len(rows) > 1 else ""
        finding_id, kind = "cache.empty-slots", "empty slots"
        if column == STALE_COLUMN:
            finding_id, kind = "cache.stale-slots", "slots with keys of an earlier text"
        share = f"{weights[worst]:.0%}".replace("%", " %")
        share = share if weights[worst] >= 0.01 else "less than 1 %"
        sentence = (
            f"{where}{plural(n_open, 'key')} open, {n_open - n_bad} filled: {share} of the "
            f"attention of this {what} is on {kind}{most}."
        )
        evidence: dict[str, Any] = {"allowed": n_open, "filled": n_open - n_bad, "slots": n_bad}
        by_layer = {step.calls[row].layer: round(weight, 4) for row, weight in weights.items()}
        evidence |= {"weight": round(weights[worst], 4), "weights": by_layer}
        return self.finding(step, finding_id, sentence, layers, evidence, series=finding_id)

    def _check_text(self, step: StepRecord) -> Finding | None:
        """Compare the input of a step with the content of the cache."""
        found: Finding | None = None
        if step.step == 0:
            self._is_cache_off = any(event.kind == NO_CACHE_EVENT for event in step.events)
            check = self._check_filled_cache if step.kv_before else self._check_lost_cache
            found = check(step)
        elif step.q_len > 1 and step.kv_before:
            found = self._check_rows(step)
        elif step.q_len > 1 and step.q_len == self._length + 1:
            self._full_forwards = self._full_forwards or [(step.step - 1, self._length)]
            self._full_forwards.append((step.step, step.q_len))
            self._masks = frozenset(call.mask for call in step.calls)
        elif step.step == 1 and step.q_len == 1:
            self._repeated = self._check_repeated_token(step)
        if step.kv_before:
            self._n_continued = 0
        self._count_answered(step)
        self._last_step = replace(step, masks=(), arrays=())
        self._length = step.kv_after
        return found

    def _token_ids(self, start: int, stop: int) -> list[int]:
        """The token ids of these positions, up to the first unknown one."""
        tokens = takewhile(bool, map(self.context.token, range(start, stop)))
        return [token.token_id for token in tokens if token is not None]

    def _check_filled_cache(self, step: StepRecord) -> Finding | None:
        """Compare the prompt that the caller assumes to be cached with texts of earlier runs."""
        # The trace does not say which cache it is, so one matching text is enough.
        n, declared = step.kv_before, self._declared_ids
        if declared is None:
            return self._check_cut(step)
        known = [ids[:n] for ids in self._cached_texts if len(ids) >= n]
        if len(declared) != n or not known or declared in known:
            return None
        cached = max(known, key=lambda ids: _common_prefix_len(ids, declared))
        wrong = [pos for pos, (a, b) in enumerate(zip(cached, declared, strict=True)) if a != b]
        sentence = (
            f"The cache holds {n} keys of another text: {len(wrong)} of the first {n} tokens of "
            f"the prompt differ from the cached ones, from position {wrong[0]} on (token "
            f"{declared[wrong[0]]}, cached {cached[wrong[0]]})"
        )
        return self._token_finding(
            step, "cache.shared", Severity.ERROR, sentence, wrong, len(wrong)
        )

    def _check_cut(self, step: StepRecord) -> Finding | None:
        """Report that the text continues with its next token although keys were removed."""
        # Rejected drafts and chat turns are cropped too, but not by more than half before the next
        # token. A smaller loss is certain only if the last step had one row and its best token
        # follows. A cache that drops one key for each new one does so by design.
        last, token = self._last_step, self.context.token(step.kv_before)
        if last is None or token is None or step.q_len != 1 or self._is_loss_reported:
            return None
        n_lost = last.kv_after - step.kv_before
        is_large = 2 * step.kv_before < last.kv_after
        candidate_ids = _candidate_ids(last)
        is_next = is_large and (_continues(last, step) or token.token_id in candidate_ids)
        is_best = candidate_ids[:1] == [token.token_id]
        # Positions that go on show that the program knows of the keys that it dropped.
        severity = Severity.NOTE if _continues(last, step) else Severity.WARNING
        if not is_next and not (n_lost > 1 and last.q_len == 1 and is_best):
            return None
        self._is_loss_reported = True
        sentence = (
            f"The cache lost keys between steps: it held {last.kv_after} and now holds "
            f"{step.kv_before}, but the text continues with the next token "
            f"({self.context.format_position(step.kv_before)})"
        )
        at = (step.kv_before,)
        return self._token_finding(step, "cache.lost", severity, sentence, at, n_lost)

    def _check_repeated_token(self, step: StepRecord) -> Finding | None:
        """Report that the first decode step repeats the last prompt token, which was not chosen."""
        last, pos = self._last_step, step.kv_before
        previous, token = self.context.token(pos - 1), self.context.token(pos)
        if last is None or not pos or previous is None or token is None:
            return None
        if token.token_id != previous.token_id or last.logits is None:
            return None
        candidate_ids = _candidate_ids(last)
        if token.token_id in candidate_ids:
            return None
        sentence = (
            f"The last token of the prompt is in the input twice: step {step.step} begins with "
            f"{self.context.format_position(pos)}, the same token as before, which is not among "
            f"the {len(candidate_ids)} best candidates of step {step.step - 1}"
        )
        id_, severity = "cache.duplicated", Severity.WARNING
        return self._token_finding(step, id_, severity, sentence, (pos,), 1)

    def _judge_repeated(self, step: StepRecord, found: Finding) -> Finding:
        """Make a repeated token a note if the program samples, so that it may have drawn it."""
        token = self.context.token(step.kv_before)
        best = _candidate_ids(self._last_step)[:1] if self._last_step is not None else []
        if token is None or not best or best == [token.token_id]:
            return found
        sentence = found.sentence + " The program samples, so it may have been drawn."
        return replace(found, severity=Severity.NOTE, sentence=sentence)

    def _check_rows(self, step: StepRecord) -> Finding | None:
        """Report rows on a filled cache that repeat the cached text from its beginning."""
        new_ids = [t.token_id for t in step.tokens if step.kv_before <= t.pos < step.kv_after]
        cached_ids = self._token_ids(0, step.kv_before)
        n_same, n_new = _common_prefix_len(cached_ids, new_ids), len(new_ids)
        finding_id, severity, n_rows = "cache.duplicated", Severity.WARNING, n_same
        if n_same == min(len(cached_ids), n_new) >= 4:
            first = self.context.format_position(step.kv_before)
            is_whole = n_same == len(cached_ids)
            severity = Severity.ERROR if is_whole else severity
            sentence = (
                f"The prompt is in the cache twice: step {step.step} repeats "
                f"{'all' if is_whole else 'the first'} {n_same} cached tokens, so the cache grows "
                f"from {step.kv_before} to {step.kv_after} keys ({first} repeats position 0)"
            )
        elif n_same < _MIN_COMMON_PREFIX or 2 * n_same < n_new:
            return self._check_next_question(step, new_ids)
        else:
            finding_id, n_rows = "cache.shared", n_new
            sentence = (
                f"Step {step.step} starts another text on a cache that still holds "
                f"{step.kv_before} keys: its first {n_same} of {n_new} tokens are the first cached "
                f"ones, then it differs ({self.context.format_position(step.kv_before + n_same)})"
            )
        positions = range(step.kv_before, step.kv_before + n_rows)
        return self._token_finding(step, finding_id, severity, sentence, positions, n_same)

    def _check_next_question(self, step: StepRecord, new_ids: Sequence[int]) -> Finding | None:
        """Report a second question on the cache of a prefix that the first one has filled.

        A further turn of a chat begins with the last token of the answer, which was chosen and not
        fed yet.
        """
        last, question, n = self._last_step, self._question, step.kv_before
        self._question = (step.step, n) if question or step.step == 1 else None
        chosen = [] if last is None else _candidate_ids(last)[:1]
        if question is None or not chosen or self._n_answered < _MIN_ANSWER:
            return None
        first_step, first = question
        eos = declared_tokenizer(self.context.generation.declared).eos
        if first_step + self._n_answered + 1 != step.step or chosen[0] in (*new_ids[:1], *eos):
            return None
        sentence = (
            f"Step {step.step} reads another question ({len(new_ids)} tokens, first: "
            f"{self.context.format_position(n)}) on the cache of this generation's first one: its "
            f"rows attend to that question and its answer, {n - first} keys from position {first} "
            f"to {n - 1}. It is no further turn, because the last token of that answer was chosen "
            "and never fed. If the questions share a prefix only, each needs a copy of its cache."
        )
        at = range(n, n + len(new_ids))
        return self._token_finding(step, "cache.shared", Severity.WARNING, sentence, at, n - first)

    def _count_answered(self, step: StepRecord) -> None:
        """Count decode steps in a row that are fed the best token of the step before."""
        last, token = self._last_step, self.context.token(step.kv_before)
        best = [] if last is None else _candidate_ids(last)[:1]
        is_answer = step.q_len == 1 and token is not None and best == [token.token_id]
        self._n_answered = self._n_answered + 1 if is_answer else 0

    def _token_finding(
        self,
        step: StepRecord,
        finding_id: str,
        severity: Severity,
        sentence: str,
        positions: Sequence[int],
        n_tokens: int,
    ) -> Finding:
        evidence = {"cached": step.kv_before, "rows": step.q_len, "tokens": n_tokens}
        options: dict[str, Any] = {"severity": severity, "positions": positions}
        return self.finding(step, finding_id, f"{sentence}.", evidence=evidence, **options)

    def _check_lost_cache(self, step: StepRecord) -> Finding | None:
        """Report single tokens that continue the last step without its cache."""
        # They continue it if their position id is the next one, or if two in a row are among the
        # best candidates of the step before them.
        last, token = self._last_step, self.context.token(0)
        # A model with only recurrent layers keeps a state instead of keys.
        has_keys = step.calls or (step.inputs is not None and step.inputs.cached_after)
        # Layers with buffers of their own, unknown to the model's cache, read more keys.
        has_buffers = any(call.kv_len > step.q_len for call in step.calls)
        if last is None or step.q_len != 1 or token is None or not has_keys or has_buffers:
            self._n_continued = 0
            return None
        is_uncached = last.q_len == 1 and not last.kv_before
        self._n_tokens_before = last.kv_after + (self._n_tokens_before if is_uncached else 0)
        self._n_continued = self._n_continued + 1 if token.token_id in _candidate_ids(last) else 0
        last_id, position_id = _last_position_id(last), _last_position_id(step)
        why = f"{self._n_continued} tokens in a row are candidates of the step before"
        continues = _continues(last, step) and (last_id or 0) > 0
        if continues:
            why = f"its position id {position_id} follows {last_id}"
        if self._is_loss_reported or not (continues or self._n_continued >= 2):
            return None
        self._is_loss_reported = True
        sentence = (
            f"The cache is lost between steps: a single token ({self.context.format_position(0)}) "
            f"has no cached keys, although {why}; it attends only to itself, and not to the "
            f"{plural(self._n_tokens_before, 'token')} before it"
        )
        evidence = {"keys": 1, "position_id": position_id}
        evidence |= {"last_generation": last.generation, "last_kv": last.kv_after}
        return self.finding(step, "cache.lost", f"{sentence}.", positions=(0,), evidence=evidence)

    def _is_causal(self) -> bool:
        """Whether new tokens leave earlier rows unchanged; masks not recorded count as causal."""
        masks = [mask for mask in map(self.context.mask, self._masks) if mask is not None]
        square = [m.cells for m in masks if m.cells is not None and m.q_len == m.kv_len]
        return not any(cells[:, :-1, -1].any() for cells in square)  # rows that see the newest key


def _common_prefix_len(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(ids, other_ids, strict=False))
    return len(list(equal))


def _candidate_ids(step: StepRecord) -> list[int]:
    """The recorded candidates for the next token, best first."""
    return [] if step.logits is None else [c.token_id for c in step.logits.candidates]


def _continues(last: StepRecord, step: StepRecord) -> bool:
    """Whether the position id of a step is the next one."""
    last_id = _last_position_id(last)
    return last_id is not None and _last_position_id(step) == last_id + 1


def _last_position_id(step: StepRecord) -> int | None:
    """The position id of the last row of a step."""
    if step.inputs is None or not step.inputs.positions:
        return None
    first, n = step.inputs.positions[-1]
    return first + n - 1
