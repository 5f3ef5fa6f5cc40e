"""Greedy choices that are not the best logit, because of an option of the generation config.

Each option is tried by itself: it explains a choice only if its logits processor acts on the best
token, or on the chosen one, of this very step. The processors are those of
`transformers.generation.logits_process`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flexinspect.core.text import printable
from flexinspect.records import imported
from flexinspect.records.finding import Severity
from flexinspect.records.step import UNKNOWN, EventRecord, LogitsRecord, StepRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.text.generate_options import GENERATE_EVENT, as_ids

CHANGED = "generate.logits-changed-by-config"
_MAX_VALUE_LENGTH = 40  # characters of a value that a sentence quotes


class _Choice(NamedTuple):
    """A choice: the ids before it, how many of them are the prompt's, and the two tokens."""

    ids: Sequence[int]
    n_prompt: int
    best: int
    chosen: int
    eos: tuple[int, ...]

    @property
    def n_new(self) -> int:
        """How many tokens were generated before it."""
        return len(self.ids) - self.n_prompt


class LogitsChangedRule(Rule):
    """Looks for the option of the generation config that explains a choice of another token."""

    name = "logits_changed"
    needs = (imported.CHOSEN, imported.LOGITS, imported.EVENTS)
    findings = finding_kinds(CHANGED)

    def reset(self) -> None:
        self._told: Mapping[str, Any] = {}

    def on_step(self, step: StepRecord) -> Findings:
        """Check a choice that is not the best; all others cost one comparison."""
        for event in step.events:
            if event.kind == GENERATE_EVENT:
                self._told = event.data if _is_greedy(event) else {}
        logits = step.logits
        if not self._told or logits is None or logits.chosen_rank in (0, UNKNOWN):
            return
        if step.branch or not logits.candidates or logits.n_nan:
            return
        choice = self._read_choice(step, logits)
        if choice is None or logits.chosen_logprob >= logits.candidates[0].logprob:
            return
        changing = self._told["changing"]
        for option, explain in _EXPLANATIONS.items():
            why = explain(choice, changing[option]) if option in changing else ""
            if why:
                yield self._finding(step, logits, option, changing[option], why)
                return

    def _read_choice(self, step: StepRecord, logits: LogitsRecord) -> _Choice | None:
        tokens = [self.context.token(pos) for pos in range(step.kv_after)]
        ids = [token.token_id for token in tokens if token is not None]
        if len(ids) < len(tokens):
            return None
        n_prompt = sum(token is not None and token.step is None for token in tokens)
        eos = as_ids(self._told["options"].get("eos_token_id"))
        return _Choice(ids, n_prompt, logits.candidates[0].token_id, logits.chosen_id, eos)

    def _finding(
        self, step: StepRecord, logits: LogitsRecord, option: str, value: Any, why: str
    ) -> Any:
        best = logits.candidates[0]
        chosen = next((t for t in step.tokens if t.token_id == logits.chosen_id), None)
        word = printable((chosen.text or chosen.token) if chosen else "") or str(logits.chosen_id)
        text = printable(best.text) or str(best.token_id)
        shown = str(value)
        if len(shown) > _MAX_VALUE_LENGTH:
            shown = shown[: _MAX_VALUE_LENGTH - 1] + "…"
        asks = "do_sample" in self._told["passed"]
        call = "asks for greedy decoding (do_sample=False) and" if asks else "is greedy and"
        sentence = (
            f'Step {step.step} chose "{word}" (id {logits.chosen_id}, rank {logits.chosen_rank}) '
            f'over the best logit, "{text}" (id {best.token_id}): the call of generate {call} does '
            f"not pass {option}, so the generation config's {option}={shown} is at work: {why}."
        )
        evidence = {"option": option, "value": value, "best": best.token_id}
        evidence |= {"chosen": logits.chosen_id, "rank": logits.chosen_rank}
        # Such a list or token is how some architectures are meant to decode, Whisper for one.
        is_meant = not asks or option in _PARTS_OF_A_MODEL
        severity = Severity.NOTE if is_meant else None
        options: dict[str, Any] = {"severity": severity, "positions": (step.kv_after,)}
        return self.finding(step, CHANGED, sentence, evidence=evidence, series=option, **options)


def _is_greedy(event: EventRecord) -> bool:
    options = event.data["options"]
    is_sampled = options.get("do_sample") or (options.get("num_beams") or 1) > 1
    return not is_sampled and bool(event.data.get("changing"))


# -- what each option does to a choice -------------------------------------------------------------


def _repeated_ngram(choice: _Choice, size: int) -> str:
    ids, prefix = choice.ids, list(choice.ids[len(choice.ids) - size + 1 :])
    ends = (n for n in range(size - 1, len(ids)) if ids[n] == choice.best)
    first = next((n for n in ends if list(ids[n - size + 1 : n]) == prefix), None)
    if first is None:
        return ""
    return f"the best token would repeat the {size} tokens at positions {first - size + 1}-{first}"


def _penalised(choice: _Choice, penalty: float) -> str:
    repeats = choice.best in choice.ids
    if penalty > 1 and repeats and choice.chosen not in choice.ids:
        return "the best token is in the text already, the chosen one is not"
    if penalty > 1 and repeats:  # both are divided by it, or multiplied below 0
        return "the best token and the chosen one are in the text already"
    is_new = choice.best not in choice.ids and choice.chosen in choice.ids
    return "the chosen token is in the text already" if penalty < 1 and is_new else ""


def _bad_word(choice: _Choice, words: Sequence[Sequence[int]]) -> str:
    for word in words:
        before = list(word[:-1])
        if word[-1] == choice.best and list(choice.ids[len(choice.ids) - len(before) :]) == before:
            return f"the best token completes {list(word)}"
    return ""


def _suppressed(choice: _Choice, ids: Sequence[int]) -> str:
    return "the best token is in this list" if choice.best in as_ids(ids) else ""


def _suppressed_first(choice: _Choice, ids: Sequence[int]) -> str:
    return "" if choice.n_new else _suppressed(choice, ids)


def _too_short(choice: _Choice, length: int) -> str:
    is_short = len(choice.ids) < length and choice.best in choice.eos
    return f"the best token is the EOS, at a length of {len(choice.ids)}" if is_short else ""


def _too_few_new(choice: _Choice, length: int) -> str:
    is_short = choice.n_new < length and choice.best in choice.eos
    return f"the best token is the EOS, behind {choice.n_new} new tokens" if is_short else ""


def _forced(choice: _Choice, ids: Any) -> str:
    return "the chosen token is the forced one" if choice.chosen in as_ids(ids) else ""


def _decayed(choice: _Choice, start_and_factor: Sequence[float]) -> str:
    is_raised = choice.chosen in choice.eos and choice.n_new > start_and_factor[0]
    return "the chosen token is the EOS, whose logit grows" if is_raised else ""


_EXPLANATIONS: Mapping[str, Callable[[_Choice, Any], str]] = {
    "no_repeat_ngram_size": _repeated_ngram,
    "bad_words_ids": _bad_word,
    "suppress_tokens": _suppressed,
    "begin_suppress_tokens": _suppressed_first,
    "min_length": _too_short,
    "min_new_tokens": _too_few_new,
    "forced_bos_token_id": _forced,
    "forced_eos_token_id": _forced,
    "exponential_decay_length_penalty": _decayed,
    "repetition_penalty": _penalised,
}
"""By option: why it explains a choice, "" if it does not; those that ban a token come first."""
_PARTS_OF_A_MODEL = frozenset(
    ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")
)
