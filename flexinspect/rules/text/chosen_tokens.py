"""Checks the chosen tokens.

- `TextRule`: loops, flat or collapsed distributions, empty answers. A tiny random model always
  loops, which is not a fault of its run. A loop of a trained model differs by a real vocabulary,
  near-certain tokens, and some text before the loop (untrained models with tied embeddings repeat
  their input from the first token on).
- `TokenChoiceRule`: ties that rounding decides, and tokens that were not the best. The trace does
  not say whether decoding is greedy, so this is inferred: sampling from the recorded distributions
  would not have chosen the best token every time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from typing import Any

from msgspec import Struct, field

from flexinspect.core.text import plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import SegmentKind
from flexinspect.records.step import UNKNOWN, LogitsRecord, StepRecord, TokenRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.text.generate_options import GENERATE_EVENT

MAX_PERIOD = 8  # tokens of the longest detected period
MIN_LOOP_TOKENS = 12
MAX_KEPT_TOKENS = 1024  # whose probabilities are kept: a loop is reported once it is recognized
MIN_PERIODS = 3
MIN_LOOP_PROBABILITY = 0.9  # mean probability of the tokens of a loop from which it is a warning
MIN_VOCABULARY = 1000  # tokens; toy models have smaller vocabularies
MAX_CERTAIN_ENTROPY = 1e-4  # nats; below it one token has all the probability
MIN_CERTAIN_STEPS = 16
MIN_FLAT_SHARE = 0.9  # share of log(vocabulary) from which a distribution is flat
MIN_FLAT_STEPS = 4
MAX_PEAKED_SHARE = 0.5  # share of log(vocabulary) below which a distribution is peaked


class _BranchText(Struct):
    """The generated text of a branch, and the counts of its faults."""

    ids: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_PERIOD + 1))
    n_tokens: int = 0
    logprobs: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_TOKENS))
    is_not_best: deque[bool] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_TOKENS))
    matches: Counter[int] = field(default_factory=Counter)
    """By period: number of consecutive tokens equal to the one a period earlier."""
    loop_period: int = 0
    n_certain: int = 0
    n_flat: int = 0
    n_peaked: int = 0
    has_nan: bool = False  # whether a token was chosen from NaN logits, which another rule reports
    first_token: TokenRecord | None = None
    first_step: StepRecord | None = None


class TextRule(Rule):
    """Follows the chosen tokens and their distributions."""

    name = "text"
    needs = (imported.WORDS, imported.CHOSEN)
    findings = finding_kinds("text.[!nm]*")  # the others are those of other rules

    def reset(self) -> None:
        self._texts = defaultdict[int, _BranchText](_BranchText)
        self._vocabulary = max((t.token_id for t in self.context.generation.tokens), default=-1) + 1

    def on_step(self, step: StepRecord) -> Findings:
        """Check the text up to the token that this step chose."""
        text, logits = self._texts[step.branch], step.logits
        text.has_nan = text.has_nan or (logits is not None and logits.n_nan > 0)
        if text.has_nan:
            return
        if logits is not None:
            yield from self._check_entropy(step, logits, text)
        for token in step.tokens:
            if token.step == step.step:
                yield from self._add_token(step, token, logits, text)

    def on_generation_end(self) -> Findings:
        """Report answers that ended with their first token."""
        segments = self.context.generation.segments
        starts = [one.start for one in segments if one.kind is SegmentKind.GENERATED]
        for text in self._texts.values():
            step, token = text.first_step, text.first_token
            if step is None or token is None or not token.special or text.n_tokens != 1:
                continue
            if not any(start < token.pos for start in starts):  # no part of the answer before it
                yield self._stopped_finding(step, token)

    def _add_token(
        self, step: StepRecord, token: TokenRecord, logits: LogitsRecord | None, text: _BranchText
    ) -> Findings:
        if text.first_token is None:
            text.first_token, text.first_step = token, step
        rank = UNKNOWN if logits is None else logits.chosen_rank
        text.n_tokens += 1
        text.is_not_best.append(rank not in (0, UNKNOWN))
        text.logprobs.append(logits.chosen_logprob if logits is not None else math.nan)
        ids, matches, looping = text.ids, text.matches, 0
        ids.append(token.token_id)
        for period in range(1, len(ids)):
            matches[period] = matches[period] + 1 if ids[-1 - period] == ids[-1] else 0
            n_tokens = matches[period] + period
            if not looping and n_tokens >= max(MIN_LOOP_TOKENS, MIN_PERIODS * period):
                looping = period
        is_new, text.loop_period = text.loop_period != looping, looping
        # A flat distribution has its own finding.
        is_expected = token.special or text.n_flat >= MIN_FLAT_STEPS
        if looping and is_new and not is_expected:
            yield self._loop_finding(step, token, text, looping)

    def _loop_finding(
        self, step: StepRecord, token: TokenRecord, text: _BranchText, period: int
    ) -> Finding:
        length = text.matches[period] + period
        before = map(self.context.token, range(step.kv_after - period + 1, step.kv_after))
        last = "".join(t.text or t.token for t in (*before, token) if t is not None)
        logprobs = list(text.logprobs)[-length:]
        probability = math.exp(sum(logprobs) / len(logprobs))
        begins = step.step - length + 1
        what = "1 token" if period == 1 else f"the same {period} tokens"
        sentence = (
            f'The text repeats {what}, "{printable(last).strip()}", {length // period} times up to '
            f"step {step.step}: the loop begins at step {begins}, and its tokens have a "
            f"probability of {probability:.2g} (geometric mean)."
        )
        n_before = text.n_tokens - length
        n_not_best = sum(list(text.is_not_best)[-length:])
        copies_input = period == 1 and n_before < 2
        is_certain = probability >= MIN_LOOP_PROBABILITY and n_not_best * 10 <= length
        is_serious = self._vocabulary >= MIN_VOCABULARY and is_certain and not copies_input
        evidence: dict[str, Any] = {"period": period, "tokens": length, "begins": begins}
        evidence |= {"probability": probability, "vocabulary": self._vocabulary}
        options: dict[str, Any] = {"evidence": evidence, "series": f"from {begins}"}
        options["severity"] = Severity.WARNING if is_serious else Severity.NOTE
        options["positions"] = range(step.kv_after - period + 1, step.kv_after + 1)
        return self.finding(step, "text.repetition", sentence, **options)

    def _check_entropy(self, step: StepRecord, logits: LogitsRecord, text: _BranchText) -> Findings:
        entropy = logits.entropy
        if entropy < MAX_CERTAIN_ENTROPY:
            text.n_certain, text.n_flat = text.n_certain + 1, 0
            text.n_peaked += 1
            if text.n_certain >= MIN_CERTAIN_STEPS and not text.loop_period:
                sentence = (
                    f"For {text.n_certain} steps up to step {step.step}, one token has all the "
                    f"probability (entropy {entropy:.1e} nats, margin {logits.margin:.1f})."
                )
                evidence = {"steps": text.n_certain, "entropy": entropy, "margin": logits.margin}
                options: dict[str, Any] = {"positions": (step.kv_after,), "evidence": evidence}
                id_, series = "text.entropy-collapse", "certain"
                yield self.finding(step, id_, sentence, series=series, **options)
            return
        text.n_certain = 0
        if not logits.histogram:  # estimate the vocabulary size from the ids
            if self._vocabulary < MIN_VOCABULARY and logits.candidates:
                highest = max(candidate.token_id for candidate in logits.candidates)
                self._vocabulary = max(self._vocabulary, highest + 1)
            return
        size = sum(logits.histogram)
        self._vocabulary = max(self._vocabulary, size)
        share = entropy / math.log(size) if size > 1 else 0.0
        if share < MIN_FLAT_SHARE:
            text.n_flat = 0
            text.n_peaked += share < MAX_PEAKED_SHARE
            return
        text.n_flat += 1
        if text.n_flat >= MIN_FLAT_STEPS:
            yield self._flat_finding(step, logits, text, size)

    def _flat_finding(
        self, step: StepRecord, logits: LogitsRecord, text: _BranchText, size: int
    ) -> Finding:
        before, severity = "", Severity.NOTE
        if text.n_peaked >= MIN_FLAT_STEPS:
            before = f", after {text.n_peaked} steps with less than half of that"
            severity = Severity.WARNING
        elif text.n_flat > step.step:
            before = ", from the beginning on"
        sentence = (
            f"The distribution has been flat for {text.n_flat} steps up to step {step.step}: "
            f"entropy {logits.entropy:.2f} of at most {math.log(size):.2f} nats over {size} "
            f"tokens{before}."
        )
        evidence = {"entropy": logits.entropy, "vocabulary": size, "steps": text.n_flat}
        options: dict[str, Any] = {"severity": severity, "series": "flat"}
        at = (step.kv_after,)
        return self.finding(step, "text.flat", sentence, positions=at, evidence=evidence, **options)

    def _stopped_finding(self, step: StepRecord, token: TokenRecord) -> Finding:
        logits = step.logits
        p = math.exp(logits.chosen_logprob) if logits is not None else math.nan
        last = self.context.token(token.pos - 1)
        copies_last = last is not None and last.token_id == token.token_id
        name = f'"{printable(token.token)}"'
        sentence = f"The first token chosen is {name} (probability {p:.2g}): the answer is empty"
        if last is not None and last.special:
            sentence += f', and the prompt itself ends with the special token "{last.token}"'
        severity = Severity.WARNING if p >= 0.5 and not copies_last else Severity.NOTE
        evidence = {"token_id": token.token_id, "probability": p}
        options: dict[str, Any] = {"severity": severity, "positions": (token.pos,)}
        id_ = "text.stopped-at-once"
        return self.finding(step, id_, f"{sentence}.", evidence=evidence, **options)


SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}  # with the implicit one
ROUNDING_ULPS = {"bfloat16": 2, "float16": 2, "float32": 8}
"""Units in the last place by which a logit changes if its sum is computed in another order."""
MAX_TIE_MARGIN = 2.0  # the largest possible tie: two units of bfloat16 for logits of 128
MIN_GREEDY_STEPS = 8
UNLIKELY_LOGPROB = math.log(1e-4)  # below it, sampling cannot have chosen the best token so often
MAX_NOT_BEST_SHARE = 0.05  # share of other tokens in a run that still counts as greedy


class _ChoiceCounts(Struct):
    """The choices of a branch."""

    n_chosen: int = 0
    n_best: int = 0
    logprob_sum: float = 0.0
    first_not_best: tuple[StepRecord, LogitsRecord] | None = None
    has_scores: bool = True


class TokenChoiceRule(Rule):
    """Compares the chosen token with the best one."""

    name = "choice"
    needs = (imported.LOGITS, imported.CHOSEN)
    findings = finding_kinds("text.near-tie", "text.not-the-best")

    def reset(self) -> None:
        self._counts = defaultdict[int, _ChoiceCounts](_ChoiceCounts)
        self._are_changed = False  # the call of `generate` asks for it, as with bad_words_ids

    def on_step(self, step: StepRecord) -> Findings:
        """Count the choice of a step, and report a tie."""
        for event in step.events:
            if event.kind == GENERATE_EVENT:
                self._are_changed = bool(event.data.get("asked"))
        logits = step.logits
        if logits is None or not logits.candidates or logits.n_nan:
            return
        if (step.branch, step.step) in self.context.forced_tokens:
            return
        if logits.chosen_rank != UNKNOWN:
            run, best = self._counts[step.branch], logits.candidates[0]
            is_scored = best.score == best.score
            run.has_scores = run.has_scores and is_scored
            run.n_chosen += 1
            if logits.chosen_rank == 0:
                run.n_best += 1
                run.logprob_sum += best.score_logprob if is_scored else best.logprob
            elif run.first_not_best is None and logits.chosen_logprob < best.logprob:
                run.first_not_best = (step, logits)
        if logits.margin < MAX_TIE_MARGIN and logits.chosen_rank < 2 and len(logits.candidates) > 1:
            yield from self._check_tie(step, logits)

    def _check_tie(self, step: StepRecord, logits: LogitsRecord) -> Findings:
        dtype = step.calls[0].dtype if step.calls else ""
        first, second = logits.candidates[:2]
        if logits.candidates[-1].logit == first.logit and len(logits.candidates) > 2:
            return  # a flat distribution, not a tie of two
        if dtype not in SIGNIFICAND_BITS or not math.isfinite(first.logit):
            return
        if first.score == first.score and first.score != first.logit:
            return  # sampled, so rounding does not decide
        unit = math.ldexp(1.0, math.frexp(first.logit)[1] - SIGNIFICAND_BITS[dtype])
        if logits.margin > ROUNDING_ULPS[dtype] * unit:
            return
        sentence = (
            f'The two best tokens of step {step.step}, "{printable(first.text)}" and '
            f'"{printable(second.text)}", are {logits.margin:.2g} apart at a logit of '
            f"{first.logit:.4g}, where {dtype} has steps of {unit:.2g}: rounding decides between "
            "them."
        )
        evidence = {"margin": logits.margin, "logit": first.logit, "unit": unit, "dtype": dtype}
        id_, at = "text.near-tie", (step.kv_after,)
        yield self.finding(step, id_, sentence, positions=at, evidence=evidence, series="tie")

    def on_generation_end(self) -> Findings:
        """Report the first token that was not the best in a run that seems greedy."""
        for run in self._counts.values():
            n_off = run.n_chosen - run.n_best
            is_unlikely = run.n_chosen >= MIN_GREEDY_STEPS and run.logprob_sum < UNLIKELY_LOGPROB
            is_greedy = is_unlikely and n_off <= max(1, MAX_NOT_BEST_SHARE * run.n_chosen)
            is_asked = self._are_changed and not run.has_scores
            if run.first_not_best is not None and is_greedy and not is_asked:
                yield self._not_best_finding(*run.first_not_best, run)

    def _not_best_finding(
        self, step: StepRecord, logits: LogitsRecord, run: _ChoiceCounts
    ) -> Finding:
        best, n_off = logits.candidates[0], run.n_chosen - run.n_best
        chosen = next((t for t in step.tokens if t.token_id == logits.chosen_id), None)
        word = printable(chosen.text or chosen.token) if chosen else str(logits.chosen_id)
        sentence = (
            f'Step {step.step} chose "{word}" (rank {logits.chosen_rank}, probability '
            f'{math.exp(logits.chosen_logprob):.2g}) over the best token "{printable(best.text)}" '
            f"({math.exp(best.logprob):.2g}), while {run.n_best} of {run.n_chosen} chosen tokens "
            f"are the best: greedy decoding would not make {plural(n_off, 'other choice')}"
        )
        if not run.has_scores:
            sentence += ", unless a logits processor that was not recorded changed the scores"
        evidence = {"rank": logits.chosen_rank, "chosen": logits.chosen_id, "off": n_off}
        severity = None if run.has_scores else Severity.NOTE
        options: dict[str, Any] = {"severity": severity, "positions": (step.kv_after,)}
        id_ = "text.not-the-best"
        return self.finding(step, id_, f"{sentence}.", evidence=evidence, **options)
