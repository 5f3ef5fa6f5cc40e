"""Audits the steps of a program that ran: compares them with the reference, explains a divergence.

One forward of the reference over the committed text judges all steps of a generation at once: the
row of a position is the row that the step of that position must have given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from msgspec import Struct, field, to_builtins

from flexinspect.core.errors import FlexInspectError
from flexinspect.rules.text.generate_options import GENERATE_EVENT
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.audit.caches.cache_beside_text import OTHER_ROW, mask_change
from flexinspect_hooks.audit.caches.rejected_drafts import find_rejected, rows_of_proposals
from flexinspect_hooks.audit.caches.shortened_cache import explain_shortened
from flexinspect_hooks.audit.caches.unordered_beams import BeamRow, find_unordered
from flexinspect_hooks.audit.evidence.audited_sequence import (
    AuditedSequence,
    AuditedStep,
    has_equal_prompts,
    read_sequence,
)
from flexinspect_hooks.audit.evidence.expert_routing import describe_other, router_noise, settle
from flexinspect_hooks.audit.evidence.graph_steps import is_graph_step, read_graph_step
from flexinspect_hooks.audit.evidence.row_comparison import (
    Divergence,
    RowComparison,
    describe,
    dtype_of,
    forward_order,
    noise_limits,
)
from flexinspect_hooks.audit.evidence.step_evidence import MAX_BATCH, EvidenceStore, StepEvidence
from flexinspect_hooks.audit.evidence.trace_evidence import fill_from_trace
from flexinspect_hooks.audit.explanations.switched_modules import (
    AGAIN,
    describe_switch,
    find_switch,
    first_step_computed_again,
)
from flexinspect_hooks.audit.explanations.token_choice import (
    ChoiceReader,
    ChosenToken,
    crossed_rows,
)
from flexinspect_hooks.audit.explanations.unexplained import Unexplained
from flexinspect_hooks.audit.forward.forward_run import KEY, QUERY, VALUE, Point, Run
from flexinspect_hooks.audit.forward.held_weights import MAX_HELD_SHARE, free_bytes
from flexinspect_hooks.audit.forward.module_state import RowStates, row_states
from flexinspect_hooks.audit.forward.program_hooks import (
    HookInReference,
    describe_hook,
    hook_choices,
)
from flexinspect_hooks.audit.forward.program_rotary import ProgramRotary, program_rotary
from flexinspect_hooks.audit.forward.score_mods import (
    MAX_ROWS,
    additive_bias,
    heads_of_other_groups,
)
from flexinspect_hooks.audit.forward.weights import Snapshot
from flexinspect_hooks.audit.hypotheses import load_hypotheses
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe
from flexinspect_hooks.audit.hypotheses.search import MIN_GAIN, Explanation, Search, SearchResult
from flexinspect_hooks.audit.reference.executed_masks import (
    GenerationMasks,
    read_masks,
    segment_starts,
)
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel
from flexinspect_hooks.audit.reference.slot_layout import find_slots

Report = Callable[[str, float | None], None]

MAX_LOGIT_ROWS = 64
"""Rows of logits that one forward of the reference gives."""
MAX_TOKENS = 4096
"""Longer sequences are not audited: eager attention needs memory for all pairs."""


_N_FORWARDS, _CPU_RATE, _GPU_RATE = 3, 2e10, 1e13
"""Forwards of a comparison, and operations per second, for an estimate of its time."""


GRAPH_LAYERS = (
    "the layers, which ran inside a compiled graph (with TORCH_COMPILE_DISABLE=1 they are judged)"
)


class AuditOptions(Struct, frozen=True):
    """`seconds` is the budget of all audits of a run, `dtype` that of the reference."""

    seconds: float = 10.0
    dtype: str = "float32"


class Verdict(Struct):
    """What an audit found in one batch row of a generation.

    `not_judged` are reasons, in sentences' ends; `pos` is the input column of the divergence, which
    is the position that the trace has for it.
    """

    generation: int
    batch: int
    n_steps: int = 0
    n_rows: int = 0
    divergence: Divergence | None = None
    search: SearchResult | None = None
    mask_kind: str = "own"
    not_judged: list[str] = field(default_factory=list)
    largest: float = 0.0
    notes: list[str] = field(default_factory=list)
    quantities: tuple[str, ...] = ()
    pos: int = 0
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    choice: dict[str, Any] | None = None
    """The rule by which tokens were chosen, see `ChoiceReader`."""
    is_beam: bool = False
    """Whether the divergence is a cache row of another beam."""
    hooks: list[dict[str, Any]] = field(default_factory=list)
    """What hooks of the program changed, see `describe_hook`."""
    switched: dict[str, Any] | None = None
    """What was switched within the text, see `describe_switch`."""
    by_kv_head: dict[str, Any] | None = None
    """Query heads whose score_mod is that of another group of heads, and the layers."""

    @property
    def explanation(self) -> Explanation | None:
        """The fault that gives the program's numbers, if one was found."""
        return None if self.search is None else self.search.explanation


class _Attempt(Struct, frozen=True):
    """A comparison under some masks: its base run, first divergence and largest difference.

    `router_noise` is that of the scores of experts, by layer.
    """

    base: Run
    clean: Mapping[Point, torch.Tensor]
    comparison: RowComparison
    divergence: Divergence | None
    largest: float
    router_noise: Mapping[int, float]
    dtype: torch.dtype


class ProgramAudit:
    """Audits the generations of one model, while its weights are held."""

    def __init__(
        self,
        store: EvidenceStore,
        reader: TraceReader | None,
        options: AuditOptions,
        *,
        deadline: float,
        report: Report = lambda what, fraction: None,
    ) -> None:
        self._store, self._reader, self._options = store, reader, options
        self._deadline, self._report = deadline, report
        self._references: dict[torch.dtype, ReferenceModel] = {}
        self._source: Snapshot
        self._noise = torch.Generator().manual_seed(0)
        self._dtype_note = ""
        self._now = -1  # the generation that is judged
        self._row_states: RowStates | None = None
        self._own_masks: set[int] = set()
        """Generations whose batch row 0 agrees under the mask that ran, which nobody declared."""
        self._agreeing: list[BeamRow] = []
        self._choices: list[list[ChosenToken]] = []
        """Of the batch rows of a generation."""
        self._hook_choice: dict[int, int] = {}
        """Generations whose hooks are taken into the reference, and the number of the choice."""
        self._told = set[tuple[int, str, str]]()
        """Generations and hooks that were reported: batch rows share them."""

    def run(self) -> list[Verdict]:
        """Return a verdict per generation and batch row, in order.

        Raises `FlexInspectError` if this model has no reference, so that no step is judged.
        """
        verdicts, problems = list[Verdict](), list[FlexInspectError]()
        for generation, why in self._store.skipped.items():
            if generation not in self._store.steps:
                verdicts.append(Verdict(generation, 0, not_judged=[why]))
        for generation, steps in self._store.steps.items():
            if len(steps) == 1 and steps[0].has_gradients and steps[0].is_training:
                training = "a training step is not a generation"
                verdicts.append(Verdict(generation, 0, not_judged=[training]))
                continue
            if self._reads_own_buffer(generation, steps[0]):
                why = (
                    "its layers read keys of buffers of their own, which the forward does not show"
                )
                verdicts.append(Verdict(generation, 0, not_judged=[why]))
                continue
            try:
                self._use_weights(generation)
            except FlexInspectError as problem:
                problems.append(problem)
                reason = problem.message[:1].lower() + problem.message[1:].rstrip(".")
                verdicts.append(Verdict(generation, 0, not_judged=[reason]))
                continue
            verdicts += self._judge_generation(generation, steps)
        if problems and len(problems) == len(verdicts):
            raise problems[0]
        return verdicts

    def _reads_own_buffer(self, generation: int, first: StepEvidence) -> bool:
        """Whether a forward without a cache goes on with a text whose keys its layers have."""
        if first.kv_before or first.positions is None or generation not in self._store.pools:
            return False
        return first.padding is None and int(first.positions.min()) > 0

    def _use_weights(self, generation: int) -> None:
        """Judge with the weights that a generation had. Raises `FlexInspectError` if they are lost.

        A reference of other weights is dropped, because it may be as large as they are.
        """
        source = self._store.weights.of(generation)
        if source is not getattr(self, "_source", None):
            self._source, self._dtype_note = source, ""
            self._references.clear()

    def _judge_generation(self, generation: int, steps: Sequence[StepEvidence]) -> list[Verdict]:
        """Return a verdict per batch row."""
        verdicts, reference = list[Verdict](), self._reference(self._affordable_dtype())
        self._agreeing.clear()
        self._choices.clear()
        n_rows = max(int(one.ids.shape[0]) for one in steps if one.ids is not None)
        n_batch = min(n_rows, MAX_BATCH)
        for batch in range(n_batch):
            if problem := self._time_problem(steps):
                verdicts.append(Verdict(generation, batch, not_judged=[problem]))
                continue
            self._report(f"auditing generation {generation}", None)
            started = time.perf_counter()
            verdict = self._judge(reference, generation, batch)
            verdict.seconds = time.perf_counter() - started
            verdicts.append(verdict)
        if len(self._agreeing) == n_batch > 1:
            self._judge_beams(reference, verdicts)
        if all(one.divergence is None or not one.is_beam for one in verdicts):
            verdicts[0].choice = crossed_rows(self._choices) or verdicts[0].choice
        return verdicts

    def _judge_beams(self, reference: ReferenceModel, verdicts: Sequence[Verdict]) -> None:
        """Report a row whose cache is of another beam, if the rows are beams of one prompt."""
        found = find_unordered(reference, self._agreeing)
        if found is not None:
            verdict = verdicts[found[0]]
            verdict.divergence, verdict.search = found[1:]
            verdict.is_beam = True
            verdict.pos = self._agreeing[found[0]].comparison.sequence.input_rows[found[1].row]

    def _affordable_dtype(self) -> torch.dtype:
        """Return the dtype of the reference: that of the weights where a copy would not fit."""
        wanted: torch.dtype = getattr(torch, self._options.dtype)
        first = self._source.parameters[0]
        n_bytes = sum(one.numel() for one in self._source.parameters) * wanted.itemsize
        if (self._source.grafts or self._source.low_rank) and first.dtype != wanted:
            self._dtype_note = "adapters and modules of other libraries are used in their own dtype"
            return first.dtype
        if first.dtype == wanted or n_bytes <= MAX_HELD_SHARE * free_bytes(first.device):
            return wanted
        self._dtype_note = f"the weights are too large for a copy in {self._options.dtype}"
        return first.dtype

    def _time_problem(self, steps: Sequence[StepEvidence]) -> str:
        """Return why a sequence cannot be judged in the time that is left; empty if it can."""
        left = self._deadline - time.perf_counter()
        if left <= 0:
            return "the time was used up"
        n_parameters = sum(one.numel() for one in self._source.parameters)
        is_gpu = self._source.parameters[0].device.type == "cuda"
        n_tokens = sum(one.q_len for one in steps)
        seconds = _N_FORWARDS * 2 * n_parameters * n_tokens / (_GPU_RATE if is_gpu else _CPU_RATE)
        if seconds <= left:
            return ""
        return (
            f"the reference would take about {seconds:.0f} s, and {left:.0f} s are left "
            "(flexinspect audit --seconds S has more)"
        )

    def _reference(self, dtype: torch.dtype) -> ReferenceModel:
        if dtype not in self._references:
            self._references[dtype] = ReferenceModel(self._source, dtype)
        self._references[dtype].row_states = self._row_states
        return self._references[dtype]

    # -- one sequence ----------------------------------------------------------------------------

    def _judge(self, reference: ReferenceModel, generation: int, batch: int) -> Verdict:
        verdict, self._now = Verdict(generation, batch), generation
        verdict.notes += [*reference.notes, *([self._dtype_note] if self._dtype_note else [])]
        steps = self._store.steps[generation]
        fill_from_trace(self._reader, steps)
        bare = next((one for one in steps if not one.values), None)
        if bare is not None:
            self._store.skipped.setdefault(generation, self._store.full_problem(bare.step))
        skipped = self._store.skipped.get(generation)
        if skipped:
            verdict.not_judged.append(skipped)
        steps = self._store.with_earlier_steps(generation)
        sequence = read_sequence(steps, batch, reference.config)
        if sequence.stopped:
            verdict.not_judged.append(sequence.stopped)
        if not any(step.evidence.generation == generation for step in sequence.steps):
            sequence.steps.clear()
        if not sequence.steps or len(sequence.ids) > MAX_TOKENS:
            if sequence.steps:
                verdict.not_judged.append(f"it has more than {MAX_TOKENS} tokens")
            return verdict
        if reference.encoder_runner is not None and not self._read_encoder(sequence, verdict):
            return verdict
        self._use_states(reference, sequence, verdict)
        slot_of = find_slots(reference, sequence, self._store.pools.get(generation))
        masks = read_masks(self._reader, generation, sequence, reference, slot_of)
        if masks.executed and masks.kind == "own" and steps[0].has_unknown_positions:
            verdict.not_judged.append(
                "the program calls the parts of the layers under a mask of its own, and which "
                "positions it means is not known"
            )
            return verdict
        if masks.unread:
            verdict.not_judged.append(f"the executed masks: {masks.unread}")
        if masks.kind == "declared" and batch:
            verdict.not_judged.append("the trace has the masks of batch row 0 only")
            return verdict
        if batch and generation in self._own_masks:
            verdict.not_judged.append("the trace has the masks of batch row 0 only")
            return verdict
        if batch:
            # Of the same prompt length, the masks of row 0 may be those of all rows.
            masks = GenerationMasks(executed={} if sequence.is_padded else masks.executed)
        biases = self._biases(reference, sequence, verdict)
        self._compare(reference, sequence, masks, biases, verdict)
        return verdict

    def _use_states(
        self, reference: ReferenceModel, sequence: AuditedSequence, verdict: Verdict
    ) -> None:
        """Let the program's modules compute each row in the state that they had in its step."""
        states = row_states(sequence.steps) if reference.taken else None
        self._row_states = reference.row_states = states
        if states is None:
            return
        switch = find_switch(reference, states)
        if switch is None:
            self._row_states = reference.row_states = states.only_first
            return
        verdict.notes.append("each step is judged with the flags and numbers that they had in it")
        if not verdict.batch:
            facts = describe_switch(reference, sequence, switch, verdict.generation)
            verdict.switched = facts
        again = first_step_computed_again(sequence, switch)
        if again is not None:
            verdict.not_judged.append(AGAIN.format(step=again.evidence.step))
            sequence.steps = sequence.steps[: sequence.steps.index(again)]

    def _read_encoder(self, sequence: AuditedSequence, verdict: Verdict) -> bool:
        """Set what the encoder of a sequence reads; return whether it is known."""
        first = sequence.steps[0]
        given = first.evidence.encoder
        if given is None or (given.ids is None and given.states is None):
            verdict.not_judged.append("what the encoder read, or gave, was not recorded")
            return False
        pad = getattr(self._source.config, "pad_token_id", None)
        sequence.encoder = given.with_padding(pad).row(first.row)
        if given.ids is None:
            verdict.notes.append(
                "the output of the encoder is taken as it is, because what it read is not known"
            )
        return True

    def _biases(
        self, reference: ReferenceModel, sequence: AuditedSequence, verdict: Verdict
    ) -> dict[int, torch.Tensor]:
        """Return what the program's score_mods add to the scores of each layer."""
        heads = getattr(reference.config, "num_attention_heads", 1)
        biases: dict[int, torch.Tensor] = {}
        by_kv_head = list[int]()
        for layer, score_mod in sequence.steps[0].evidence.score_mods.items():
            bias = additive_bias(score_mod, heads, len(sequence.ids), reference.device)
            if bias is not None:
                biases[layer] = bias[None]
                n_kv = getattr(reference.config, "num_key_value_heads", None) or heads
                if wrong := heads_of_other_groups(bias, n_kv):
                    verdict.by_kv_head = {"heads": wrong, "total": heads, "kv_heads": n_kv}
                    by_kv_head.append(layer)
        if verdict.by_kv_head is not None:
            verdict.by_kv_head["layers"] = by_kv_head
        if biases:
            verdict.notes.append("the program's score_mod is taken as it is")
        return biases

    def _compare(
        self,
        reference: ReferenceModel,
        sequence: AuditedSequence,
        masks: GenerationMasks,
        biases: dict[int, torch.Tensor],
        verdict: Verdict,
    ) -> None:
        first, masks = self._best_attempt(reference, sequence, masks, biases, verdict)
        if first.divergence is not None or verdict.generation in self._hook_choice:
            first = self._with_hooks(reference, sequence, masks, biases, first, verdict)
        comparison, found = first.comparison, first.divergence
        if first.base.other_experts:
            verdict.notes.append(describe_other(first.base.other_experts))
        verdict.mask_kind = masks.kind
        if masks.kind == "executed" and not verdict.batch:
            self._own_masks.add(verdict.generation)
        verdict.n_steps, verdict.n_rows = len(comparison.steps), _n_rows(comparison.steps)
        verdict.largest, verdict.divergence = first.largest, found
        verdict.quantities = comparison.quantities(first.clean)
        if any(map(is_graph_step, comparison.steps)):
            verdict.not_judged.append(GRAPH_LAYERS)
        wrong = None if found is None else found.step
        choices = ChoiceReader(reference, comparison, first.base, first.clean, wrong)
        self._judge_choices(choices, sequence, verdict)
        crop = _crop_before(sequence, verdict.generation, found)
        if sequence.encoder is not None and found is None:
            return  # beams and proposals are not looked for
        if crop is not None:
            self._judge_shortened(reference, comparison, crop, verdict)
            return
        if found is None:
            if not biases and not first.base.hooks:
                self._find_rejected(reference, sequence, masks, first, verdict)
            return
        probe = self._probe(reference, sequence, masks, comparison, found)
        probe.has_bias = bool(biases)
        self._explain(reference, probe, first, found, verdict)
        mods = {} if biases else sequence.steps[0].evidence.score_mods
        if verdict.search is None or verdict.explanation is not None:
            return
        if mods:
            self._take_score_mods(reference, sequence, masks, first, mods, verdict)
            return
        try:
            is_taken = self._take_rotary(reference, sequence, masks, first, biases, verdict)
        except Exception:  # code of the program
            is_taken = False
        is_prompt = found.step == sequence.steps[0].evidence.step
        if not is_taken and is_prompt and found.point[0] in (QUERY, KEY, VALUE):
            self._explain_otherwise(reference, sequence, masks, first, biases, verdict)

    def _take_rotary(
        self,
        reference: ReferenceModel,
        sequence: AuditedSequence,
        masks: GenerationMasks,
        first: _Attempt,
        biases: dict[int, torch.Tensor],
        verdict: Verdict,
    ) -> bool:
        """Take a rotary module of the program as it is, if more of the run agrees with it then.

        Returns whether it was taken.
        """
        names = [name for name, _ in reference.model.named_modules()]
        size, root = reference.config.hidden_size, self._source.root()
        rotary, before = program_rotary(root, names, size, first.dtype), first.divergence
        if rotary is None or before is None or not rotary.has_exact_angles:
            return False
        now = self._attempt(
            *(reference, sequence, masks, biases, verdict.generation),
            positions=first.base.positions,
            hooks=first.base.hooks,
            rotary=rotary,
        )
        positions = torch.arange(len(sequence.ids), device=reference.device)[None]
        is_rounded = rotary.first_rounded(positions) is not None
        if not _later(now.divergence, before) and not is_rounded:
            return False
        search, facts = verdict.search, verdict.facts
        verdict.search, verdict.facts = None, {}
        if now.divergence is not None:
            probe = self._probe(reference, sequence, masks, now.comparison, now.divergence)
            probe.rotary, probe.has_bias = rotary, bool(biases)
            self._explain(reference, probe, now, now.divergence, verdict)
            if verdict.explanation is None and not _later(now.divergence, before):
                verdict.search, verdict.facts = search, facts
                return False
        verdict.notes.append(f"the rotary module {rotary.title} is taken as it is")
        verdict.largest, verdict.divergence = now.largest, now.divergence
        verdict.quantities = now.comparison.quantities(now.clean)
        return True

    def _take_score_mods(
        self,
        reference: ReferenceModel,
        sequence: AuditedSequence,
        masks: GenerationMasks,
        first: _Attempt,
        score_mods: Mapping[int, Any],
        verdict: Verdict,
    ) -> None:
        """Take score_mods of the prompt as they are, if more of the run agrees with them."""
        config = reference.config
        if getattr(config, "attn_logit_softcapping", None) or len(sequence.ids) > MAX_ROWS:
            return
        before = first.divergence
        assert before is not None
        try:
            second = self._attempt(
                *(reference, sequence, masks, {}, verdict.generation),
                positions=first.base.positions,
                hooks=first.base.hooks,
                score_mods=score_mods,
            )
        except Exception:  # code of the program
            return
        found = second.divergence
        if not _later(found, before):
            return
        verdict.notes.append("the program's score_mod is taken as it is")
        verdict.largest, verdict.divergence = second.largest, found
        verdict.quantities = second.comparison.quantities(second.clean)
        verdict.search, verdict.facts = None, {}
        if found is not None:
            probe = self._probe(reference, sequence, masks, second.comparison, found)
            probe.meant_score_mods = score_mods
            self._explain(reference, probe, second, found, verdict)

    def _find_rejected(
        self,
        reference: ReferenceModel,
        sequence: AuditedSequence,
        masks: GenerationMasks,
        first: _Attempt,
        verdict: Verdict,
    ) -> None:
        """Look for rejected proposals in a sequence that agrees; else keep it, for beams."""
        rejected = None
        if rows_of_proposals(sequence) and masks.kind == "own":
            rejected = find_rejected(reference, first.comparison, first.clean)
        if rejected is not None:
            verdict.divergence, verdict.search = rejected
            verdict.pos = sequence.input_rows[rejected[0].row]
        elif not masks.base:
            self._agreeing.append(BeamRow(first.comparison, first.clean, first.largest))

    def _explain(
        self,
        reference: ReferenceModel,
        probe: FaultProbe,
        first: _Attempt,
        found: Divergence,
        verdict: Verdict,
    ) -> None:
        """Search the faults that give the program's numbers from a divergence on."""
        comparison = first.comparison
        sequence = comparison.sequence
        hypotheses, failed = load_hypotheses()
        verdict.notes += [
            f"the hypothesis {name} did not load: {why}" for name, why in failed.items()
        ]
        search = Search(
            reference,
            comparison,
            first.base,
            probe,
            found,
            deadline=self._deadline,
            report=self._report,
            router_noise=first.router_noise,
        )
        verdict.search = search.find(hypotheses)
        verdict.pos = sequence.input_rows[found.row]
        verdict.facts = self._facts(sequence, found)
        at, layers = comparison.step_of(found), sorted(reference.blocks)
        graph = read_graph_step(comparison, at, first.clean, layers)
        if graph is not None:
            verdict.facts["graph"] = to_builtins(graph)
        if verdict.search.explanation is None:
            unexplained = Unexplained(
                reference, self._source, comparison, first.base, first.clean, found
            )
            verdict.facts |= unexplained.facts()

    def _judge_choices(
        self, choices: ChoiceReader, sequence: AuditedSequence, verdict: Verdict
    ) -> None:
        """Judge how the program chose its tokens, at the end of each cache."""
        generation = verdict.generation
        if not self._is_last(generation) or self._is_chosen_by_generate(generation):
            return
        if not has_equal_prompts(sequence.steps[0].evidence):
            verdict.choice = choices.facts()
        self._choices.append(choices.choices())

    def _is_last(self, generation: int) -> bool:
        """Whether no later generation continues the cache of this one."""
        cache = self._store.steps[generation][-1].cache
        later = (those[0] for n, those in self._store.steps.items() if n > generation and those)
        return not any(one.kv_before and one.cache == cache for one in later)

    def _is_chosen_by_generate(self, generation: int) -> bool:
        """Whether `generate` chose the tokens, by options that may ask for any of them."""
        events = self._reader.events() if self._reader is not None else ()
        made = {row.event.generation for row in events if row.event.kind == GENERATE_EVENT}
        return generation in made

    def _best_attempt(
        self,
        reference: ReferenceModel,
        sequence: AuditedSequence,
        masks: GenerationMasks,
        biases: dict[int, torch.Tensor],
        verdict: Verdict,
    ) -> tuple[_Attempt, GenerationMasks]:
        """Compare under what the program may mean, and return where most of the run agrees.

        Of attempts that agree as far, the first one counts.
        """
        best: tuple[_Attempt, GenerationMasks, torch.Tensor | None] | None = None
        for chosen, positions in _meanings(sequence, masks):
            now = self._attempt(
                reference, sequence, chosen, biases, verdict.generation, positions=positions
            )
            before = best[0].divergence if best is not None else None
            if best is None or (before is not None and _later(now.divergence, before)):
                best = now, chosen, positions
            if best[0].divergence is None:
                break
        assert best is not None
        if best[2] is not None:
            verdict.notes.append(_positions_taken(sequence))
        return best[0], best[1]

    def _explain_otherwise(
        self,
        reference: ReferenceModel,
        sequence: AuditedSequence,
        masks: GenerationMasks,
        first: _Attempt,
        biases: dict[int, torch.Tensor],
        verdict: Verdict,
    ) -> None:
        """Search again under what else the program may mean, and keep an explanation of the step.

        Where a difference begins before the attention, no attempt shows which mask is meant.
        """
        search, before = verdict.search, first.divergence
        for chosen, positions in _meanings(sequence, masks):
            is_known = chosen.kind == verdict.mask_kind and positions is None
            if is_known or time.perf_counter() > self._deadline:
                continue
            now = self._attempt(
                *(reference, sequence, chosen, biases, verdict.generation),
                positions=positions,
                hooks=first.base.hooks,
            )
            found = now.divergence
            if found is None or before is None or found.step < before.step:
                continue
            facts = verdict.facts
            probe = self._probe(reference, sequence, chosen, now.comparison, found)
            probe.has_bias = bool(biases)
            self._explain(reference, probe, now, found, verdict)
            if verdict.explanation is None or not verdict.explanation.is_complete:
                verdict.search, verdict.facts = search, facts
                continue
            verdict.largest, verdict.divergence, verdict.mask_kind = now.largest, found, chosen.kind
            verdict.quantities = now.comparison.quantities(now.clean)
            verdict.notes += [] if positions is None else [_positions_taken(sequence)]
            return

    def _attempt(
        self,
        reference: ReferenceModel,
        sequence: AuditedSequence,
        masks: GenerationMasks,
        biases: dict[int, torch.Tensor],
        generation: int,
        *,
        positions: torch.Tensor | None = None,
        hooks: Sequence[HookInReference] = (),
        score_mods: Mapping[int, Any] | None = None,
        rotary: ProgramRotary | None = None,
    ) -> _Attempt:
        """Compare a sequence with the reference under some masks and positions (1, rows)."""
        ids = sequence.ids
        if positions is None:
            positions = torch.arange(len(ids))[None]
        positions = positions.to(reference.device)
        ends = sequence.ends().to(reference.device)
        base = Run(
            *(positions, ends, masks.base, biases, score_mods or {}),
            encoder=sequence.encoder,
            hooks=hooks,
            rotary=rotary,
        )
        last = [int(step.positions[-1]) for step in sequence.steps]
        proposals = rows_of_proposals(sequence)[:MAX_LOGIT_ROWS]
        half = MAX_LOGIT_ROWS // 2
        rows = sorted({*last[:half], *last[-half:], *proposals})
        clean = reference.run(ids, base, rows)
        dtype = dtype_of(sequence.steps)
        runs = [self._noisy(reference, ids, base, rows, dtype)]
        if dtype != reference.dtype:
            runs.append(self._in_dtype(ids, base, rows, dtype))
        noisy = [one.values for one in runs]
        of_digests = any(step.evidence.dtype is not None for step in sequence.steps)
        limits = noise_limits(clean, noisy, dtype, of_digests=of_digests)
        comparison = RowComparison(sequence, limits, rows, generation)
        noise = router_noise(base, [one.routes for one in runs])
        settled = settle(reference, comparison, base, clean, noise)
        largest = comparison.agreement(settled.values, comparison.steps, None)[0]
        return _Attempt(
            settled.base, settled.values, comparison, settled.divergence, largest, noise, dtype
        )

    def _with_hooks(
        self,
        reference: ReferenceModel,
        sequence: AuditedSequence,
        masks: GenerationMasks,
        biases: dict[int, torch.Tensor],
        first: _Attempt,
        verdict: Verdict,
    ) -> _Attempt:
        """Take the program's hooks into the reference, if more of the run agrees with them.

        Those of batch row 0 act in the other rows, too, where they may show in the logits only.
        """
        known, dtype = [name for name, _ in reference.model.named_modules() if name], first.dtype
        best, chosen = first, self._hook_choice.get(verdict.generation)
        with suppress(Exception):  # code of the program may need a state that is gone
            choices = hook_choices(sequence.steps, self._source.root(), known, dtype)
            for number, hooks in enumerate(choices):
                if time.perf_counter() > self._deadline:
                    break
                if chosen not in (None, number) and first.divergence is None:
                    continue
                with suppress(Exception):
                    now = self._attempt(
                        reference,
                        sequence,
                        masks,
                        biases,
                        verdict.generation,
                        positions=first.base.positions,
                        hooks=hooks,
                    )
                    if _is_explained(best, now):
                        best = now
                        self._hook_choice.setdefault(verdict.generation, number)
                    if not any(hooked.effects for hooked in hooks):
                        break  # the first choice has all of them
                if best.divergence is None and (best is not first or chosen == number):
                    break
        is_one = sum(bool(hooked.effects) for hooked in best.base.hooks) == 1
        begins = self._begins(reference, first) if is_one else {}
        for hooked in best.base.hooks:
            what = (verdict.generation, hooked.hook.name, hooked.hook.where)
            if hooked.effects and what not in self._told:
                self._told.add(what)
                verdict.hooks.append(describe_hook(hooked, sequence.input_rows) | begins)
            if hooked.effects:
                verdict.notes.append(
                    f"the {hooked.hook.kind} {hooked.hook.where} of {hooked.hook.name} is taken "
                    "as it is"
                )
        return best

    def _begins(self, reference: ReferenceModel, before: _Attempt) -> dict[str, Any]:
        """Return where a difference began that hooks explain, and how the quantity differed."""
        found = before.divergence
        if found is None:
            return {}
        parts = reference, self._source, before.comparison, before.base, before.clean, found
        name, layer = found.point
        return {"quantity": name, "layer": layer, "shape": Unexplained(*parts).shape()}

    def _judge_shortened(
        self, reference: ReferenceModel, comparison: RowComparison, crop: int, verdict: Verdict
    ) -> None:
        """Judge steps after a cache became shorter, if its first and newest keys were kept."""
        steps = self._store.with_earlier_steps(verdict.generation)
        batch = verdict.batch
        whole = read_sequence(steps, batch, reference.config, keeps_rows=True)
        attempt = self._attempt(reference, whole, GenerationMasks(), {}, verdict.generation)
        result = explain_shortened(reference, attempt.comparison, self._deadline)
        before = [step for step in comparison.steps if step.evidence.step < crop]
        if result is None:
            verdict.divergence = None
            verdict.n_steps, verdict.n_rows = len(before), _n_rows(before)
            verdict.largest = comparison.agreement(attempt.clean, before, None)[0]
            verdict.not_judged.append(
                f"from step {crop} on: the cache had become shorter, and which of its keys are "
                "left is not known"
            )
            return
        verdict.notes.append(result.kept)
        verdict.divergence, verdict.search = result.divergence, result.search
        verdict.largest = result.largest
        if result.divergence is not None:
            verdict.pos = whole.input_rows[result.divergence.row]

    def _noisy(
        self,
        reference: ReferenceModel,
        ids: Sequence[int],
        base: Run,
        rows: Sequence[int],
        dtype: Any,
    ) -> Run:
        noise = torch.finfo(dtype).eps
        run = Run(
            base.positions.clone(),
            masks=base.masks,
            biases=base.biases,
            score_mods=base.score_mods,
            noise=noise,
            generator=self._noise,
            encoder=base.encoder,
            hooks=base.hooks,
            rotary=base.rotary,
            experts={layer: route.experts for layer, route in base.routes.items()},
        )
        reference.run(ids, run, rows)
        return run

    def _in_dtype(
        self, ids: Sequence[int], base: Run, rows: Sequence[int], dtype: torch.dtype
    ) -> Run:
        run = Run(
            base.positions.clone(),
            masks=base.masks,
            biases=base.biases,
            score_mods=base.score_mods,
            encoder=base.encoder,
            hooks=base.hooks,
            rotary=base.rotary,
            experts={layer: route.experts for layer, route in base.routes.items()},
        )
        self._reference(dtype).run(ids, run, rows)
        return run

    def _probe(
        self,
        reference: ReferenceModel,
        sequence: AuditedSequence,
        masks: GenerationMasks,
        comparison: RowComparison,
        found: Divergence,
    ) -> FaultProbe:
        step = comparison.step_of(found)
        counts_padding = sequence.has_default_positions and sequence.is_padded
        passed = sequence.passed_positions()
        if counts_padding:
            passed = torch.tensor([sequence.input_rows])
        return FaultProbe(
            reference,
            sequence.ids,
            sequence.n_prompt,
            found.point[1],
            found.point[0],
            step.first_row,
            is_decode=step is not sequence.steps[0],
            positions=None if passed is None else passed.to(reference.device),
            masks=masks.base,
            executed=masks.executed,
            padding=sequence.padding,
            is_training=step.evidence.is_training,
            segment_starts=segment_starts(self._reader, self._generation_of(sequence)),
            score_mods=step.evidence.score_mods,
            counts_padding=counts_padding,
            slots=masks.slots,
            encoder=sequence.encoder,
            row=found.row,
        )

    def _generation_of(self, sequence: AuditedSequence) -> int:
        return sequence.steps[0].evidence.generation

    def _mask_change(self, sequence: AuditedSequence, found: Divergence) -> str:
        """Return how the attention mask of the diverging row changed, empty if it did not."""
        steps = [one for one in sequence.steps if one.evidence.generation == self._now]
        at = next(one for one in steps if one.evidence.step == found.step)
        return mask_change([one.evidence for one in steps], at.evidence, at.row)

    def _facts(self, sequence: AuditedSequence, found: Divergence) -> dict[str, Any]:
        """Return circumstances that belong to a divergence without an explanation."""
        steps = (one for one in sequence.steps if one.evidence.generation == self._now)
        evidence = next(one.evidence for one in steps if one.evidence.step == found.step)
        layer = found.point[1]
        path = evidence.paths.get(layer) if layer is not None else None
        return {
            "training": evidence.is_training,
            "dropout": _dropout(self._source),
            "path": path or "",
            "score_mod": layer in evidence.score_mods,
            "mask_change": (change := self._mask_change(sequence, found)),
            "other_rows_mask": OTHER_ROW in change,
        }


def _dropout(source: Snapshot) -> float:
    values = (
        getattr(source.config, name, 0.0) or 0.0
        for name in (
            "attention_dropout",
            "attn_pdrop",
            "hidden_dropout",
            "resid_pdrop",
            "embd_pdrop",
        )
    )
    return max((float(one) for one in values if isinstance(one, int | float)), default=0.0)


def _depth_positions(sequence: AuditedSequence, masks: GenerationMasks) -> tuple[torch.Tensor, ...]:
    """Return the passed position ids (1, rows) if they count the keys that each row sees.

    Those of a tree of proposals do; nothing is returned if they do not, or are 0, 1, 2 …
    """
    passed = sequence.passed_positions()
    if passed is None:
        return ()
    for cells in masks.executed.values() if masks.executed else masks.base.values():
        n_seen = cells.sum(-1).cpu()
        if n_seen.shape[-1] != passed.shape[1] or not bool((n_seen - 1 == passed).all()):
            return ()
    return (passed,)


def _n_rows(steps: Sequence[AuditedStep]) -> int:
    return sum(len(step.positions) for step in steps)


def _crop_before(
    sequence: AuditedSequence, generation: int, found: Divergence | None
) -> int | None:
    """Return the step of a shorter cache that a divergence comes after, if there is one."""
    if found is None:
        return None
    crops = [crop for crop in sequence.crops if crop <= (generation, found.step)]
    if not crops:
        return None
    return crops[0][1] if crops[0][0] == generation else 0


def _meanings(
    sequence: AuditedSequence, masks: GenerationMasks
) -> Iterator[tuple[GenerationMasks, torch.Tensor | None]]:
    """Yield the masks and positions that a program may mean, None for those of the text.

    Nobody said which mask is meant if none is declared, nor which positions if the program passed
    some of its own with the prompt.
    """
    own, undeclared = sequence.prompt_positions(), masks.undeclared()
    chosen = [masks] if undeclared is None else [masks, undeclared]
    yield from ((one, None) for one in chosen)
    if own is not None:
        yield from ((one, own) for one in chosen)
    elif undeclared is not None and (depths := _depth_positions(sequence, undeclared)):
        yield undeclared, depths[0]


def _positions_taken(sequence: AuditedSequence) -> str:
    is_prompt = sequence.prompt_positions() is not None
    which = "with the prompt" if is_prompt else "with proposals in the form of a tree"
    return f"the position ids that the program passed {which} are taken as they are"


def _is_explained(before: _Attempt, now: _Attempt) -> bool:
    """Whether the hooks of an attempt explain what differed before, by far and not by its limit."""
    found = before.divergence
    if found is None:
        return now.divergence is None
    if not _later(now.divergence, found):
        return False
    step = now.comparison.step_of(found)
    differences = now.comparison.differences(step, now.clean)
    left = max((float(d.max()) for point, d, _ in differences if point == found.point), default=0.0)
    return left * MIN_GAIN <= found.difference


def _later(one: Divergence | None, other: Divergence) -> bool:
    """Whether `one` lies after `other`, or there is none."""
    if one is None:
        return True
    return (one.step, forward_order(one.point)) > (other.step, forward_order(other.point))


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as the data of an event, see docs/trace-format.md."""
    data: dict[str, Any] = {
        "batch": verdict.batch,
        "steps": verdict.n_steps,
        "rows": verdict.n_rows,
        "largest": verdict.largest,
        "mask": verdict.mask_kind,
        "quantities": list(verdict.quantities),
        "not_judged": verdict.not_judged,
        "notes": verdict.notes,
    }
    if verdict.by_kv_head is not None:
        data["by_kv_head"] = verdict.by_kv_head
    if verdict.hooks:
        data["hooks"] = verdict.hooks
    if verdict.switched is not None:
        data["switched"] = verdict.switched
    if verdict.divergence is not None:
        data |= describe(verdict.divergence) | {"facts": verdict.facts, "pos": verdict.pos}
    if verdict.search is not None:
        data |= {
            "tried": list(verdict.search.tried),
            "n_tried": verdict.search.n_tried,
            "cut": verdict.search.is_cut,
        }
        found, heads = verdict.search.explanation, verdict.search.heads
        if found is None and verdict.search.part:
            data["part"] = verdict.search.part
        if found is None and heads is not None:
            data["heads"] = {
                "sentence": heads.sentence,
                "agree": list(heads.agree),
                "total": heads.total,
            }
        if found is not None:
            data["explanation"] = {
                "names": [edit.name for edit in found.edits],
                "sentences": [edit.sentence for edit in found.edits],
                "layers": None if found.layers is None else list(found.layers),
                "difference": found.difference,
                "agree": found.agree,
                "total": found.total,
                "later": found.later,
                "n_later": found.n_later,
                "ties": list(found.ties),
            }
    return data
