"""What `generate` was told, against what the run shows: sampling, the EOS, and new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexinspect.core.text import format_ids, plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Severity
from flexinspect.records.prompt import declared_tokenizer
from flexinspect.records.step import UNKNOWN, StepRecord, TokenRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

GENERATE_EVENT = "generate"
"""The event of a first step with the options of the call of `generate`, see `generate_facts`."""
INITIALISED_EVENT = "weights-initialised"
"""The event of a first step: parameters that no checkpoint had, by the report of their loader."""

SAMPLED, EOS_PASSED, NEW_WEIGHTS, BOS_BANNED = (
    *("generate.sampling-by-config", "generate.eos-passed-over"),
    *("weights.newly-initialised", "generate.bad-words-bos"),
)
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p")
_MAX_SEQUENCES = 8  # of evidence
_MAX_KEPT = 32  # prompts that were continued greedily on request
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


class GenerateOptionsRule(Rule):
    """Judges the options of a call of `generate` by what the generation made of them."""

    name = "generate_options"
    needs = (imported.CHOSEN, imported.EVENTS)
    findings = finding_kinds(SAMPLED, EOS_PASSED, NEW_WEIGHTS, BOS_BANNED)

    def __init__(self) -> None:
        self._greedy: list[tuple[tuple[int, ...], int]] = []  # prompts, with their generations

    def reset(self) -> None:
        self._told: Mapping[str, Any] | None = None  # of the call of `generate`
        self._n_chosen = self._n_not_best = 0
        self._eos: dict[int, TokenRecord] = {}  # by branch: an EOS that was chosen last
        self._is_reported = False  # or over, because the sequence ended

    def on_step(self, step: StepRecord) -> Findings:
        """Read the events of the first step, and follow the chosen tokens."""
        for event in step.events:
            if event.kind == GENERATE_EVENT:
                self._told = event.data
                yield from self._check_bad_words(step, event.data)
            elif event.kind == INITIALISED_EVENT:
                yield self.finding(step, NEW_WEIGHTS, _new_weights(event.data), (), event.data)
        logits = step.logits
        if logits is not None and logits.chosen_rank != UNKNOWN:
            self._n_chosen += 1
            self._n_not_best += logits.chosen_rank > 0
        for token in step.tokens:
            if token.step == step.step and not self._is_reported:
                yield from self._follow_eos(step, token)

    def on_generation_end(self) -> Findings:
        """Report sampling that only the generation config asked for, if it had an effect.

        Checkpoints of instruct models sample by their config, and many programs rely on it: a note,
        unless an earlier call asked for greedy decoding of the same prompt.
        """
        told = self._told
        if told is None:
            return
        prompt = tuple(t.token_id for t in self.context.generation.tokens if t.step is None)
        if "do_sample" in told["passed"] and not told["options"].get("do_sample"):
            number = self.context.generation.generation
            self._greedy = [*self._greedy[1 - _MAX_KEPT :], (prompt, number)]
        if not self._n_not_best or not told["options"].get("do_sample"):
            return
        if not {*_SAMPLING}.isdisjoint(told["passed"]):
            return
        options = {n: told["options"][n] for n in _SAMPLING[1:] if n in told["options"]}
        shown = ", ".join(f"{n} {v:g}" for n, v in options.items() if v != _NEUTRAL[n])
        sentence = (
            "generate sampled, because the generation config of the checkpoint has do_sample=True"
            f"{f' ({shown})' if shown else ''}, and the call says nothing about it: "
            f"{self._n_not_best} of {plural(self._n_chosen, 'chosen token')} "
            f"{'is' if self._n_not_best == 1 else 'are'} not the most probable."
        )
        evidence = {**options, "not_best": self._n_not_best, "chosen": self._n_chosen}
        greedy = next((number for ids, number in self._greedy if ids == prompt), None)
        severity = None
        if greedy is not None:
            sentence += f" Generation {greedy} continued the same prompt with do_sample=False."
            evidence["greedy"], severity = greedy, Severity.WARNING
        yield self.finding(None, SAMPLED, sentence, evidence=evidence, severity=severity)

    def _check_bad_words(self, step: StepRecord, told: Mapping[str, Any]) -> Findings:
        """Find banned sequences that begin with the BOS, which no answer contains."""
        bos = declared_tokenizer(self.context.generation.declared).bos
        banned = as_sequences(told.get("asked", {}).get("bad_words_ids"))
        never = [one for one in banned if len(one) > 1 and one[0] == bos]
        if bos is None or not never:
            return
        n = len(never)
        sentence = (
            f"{n} of {len(banned)} sequences of bad_words_ids "
            f"{'begins' if n == 1 else 'begin'} with the BOS (id {bos}), such as "
            f"{list(never[0])}: a sequence is banned only as a whole, and no answer has a BOS, so "
            f"{'its words are' if n == 1 else 'their words are'} not banned."
        )
        evidence = {"bos": bos, "sequences": [list(one) for one in never[:_MAX_SEQUENCES]]}
        yield self.finding(step, BOS_BANNED, sentence, evidence=evidence)

    def _follow_eos(self, step: StepRecord, token: TokenRecord) -> Findings:
        before = self._eos.pop(step.branch, None)
        known = declared_tokenizer(self.context.generation.declared)
        is_eos, told = token.token_id in known.eos, self._told
        stops = () if told is None else as_ids(told["options"].get("eos_token_id"))
        if token.token_id in stops:  # the sequence ended, and is padded while others go on
            self._is_reported = True
        elif before is not None and (stops or not (is_eos or token.token_id == known.pad)):
            self._is_reported = True
            yield self._eos_finding(step, before, stops)
        elif is_eos:
            self._eos[step.branch] = token

    def _eos_finding(self, step: StepRecord, eos: TokenRecord, stops: Sequence[int]) -> Any:
        name = printable(eos.token or eos.text)
        told = self._told
        # A loop of one's own may have a length, and negative ids are how a call asks for that.
        is_meant = told is None or any(stop < 0 for stop in stops)
        if told is None:
            why = "the loop of the program does not end there"
        elif stops:
            why = f"generate was told to end at {format_ids(stops)}, not at {eos.token_id}"
        else:
            why = "generate was told no eos_token_id"
        sentence = (
            f'"{name}" (id {eos.token_id}) was chosen in step {eos.step}, and the text goes on '
            f"behind it: {why}."
        )
        evidence = {"eos": eos.token_id, "stops": list(stops), "position": eos.pos}
        severity = Severity.NOTE if is_meant else None
        options: dict[str, Any] = {"positions": (eos.pos,), "severity": severity}
        return self.finding(step, EOS_PASSED, sentence, evidence=evidence, **options)


def as_ids(value: Any) -> tuple[int, ...]:
    """Return the token ids of an option: one id, several, or None."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def as_sequences(value: Any) -> list[tuple[int, ...]]:
    """Return the sequences of ids of an option; [] for None and for other forms."""
    rows = value if isinstance(value, list | tuple) else ()
    return [tuple(one) for one in rows if isinstance(one, list | tuple)]


def _new_weights(data: Mapping[str, Any]) -> str:
    names, n = [printable(one) for one in data["names"]], int(data["n"])
    listed = ", ".join(names) + (f" and {n - len(names)} more" if n > len(names) else "")
    return (
        f"{printable(data['class'])} generates with newly initialised weights: {listed} "
        f"{'is' if n == 1 else 'are'} not in the checkpoint {printable(data['place'])}, and "
        "nothing has set them since."
    )
