"""What is kept of a program's steps: all of the first ones, less of later ones, never too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import ids, make_model
from torch import Tensor
from transformers import DynamicCache

from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.audit.evidence import cached_layers
from flexinspect_hooks.audit.evidence.step_evidence import FULL_STEPS, EvidenceStore
from flexinspect_hooks.audit.forward.forward_run import (
    ATTENTION,
    EMBEDDING,
    HEADS,
    HIDDEN,
    KEY,
    LOGITS,
)
from flexinspect_hooks.audit.program_audit import AuditOptions, Verdict
from flexinspect_hooks.audit.session_audit import AuditBudget, audit_session
from flexinspect_hooks.capture.new_trace import create_trace
from flexinspect_hooks.loading.tokenizers import IdAdapter
from flexinspect_hooks.user_code.generation_builder import DeclaredPrompt
from flexinspect_hooks.user_code.watch_session import WatchSession

N_STEPS = FULL_STEPS + 6
FEWER = {HIDDEN, LOGITS}
ALL = {*FEWER, EMBEDDING, ATTENTION, HEADS}

Program = Callable[[Any], object]
Watching = Callable[..., tuple[EvidenceStore, list[Verdict], TraceReader]]


def decode(model: Any, n: int = N_STEPS, on_step: Callable[[int], object] = lambda n: None) -> None:
    rows, past = torch.tensor([ids(12, 3)]), None
    for step in range(n):
        on_step(step)
        output = model(rows, past_key_values=past, use_cache=True)
        past, rows = output.past_key_values, output.logits[:, -1:].argmax(-1)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    """Run a program on a model; return its evidence, the verdicts of the audit and the trace."""
    readers: list[TraceReader] = []

    def run(
        model: Any, program: Program, store: EvidenceStore | None = None
    ) -> tuple[EvidenceStore, list[Verdict], TraceReader]:
        path = tmp_path / f"{len(readers)}.flextrace"
        writer = create_trace(path, (), "advanced", None)
        session = WatchSession(model, writer, DeclaredPrompt(IdAdapter()), level="advanced")
        store = session.context.evidence = store or EvidenceStore()
        store.weights.find_model = lambda: model
        with session, torch.no_grad():
            program(model)
            assert session.has_hooks_installed
            session.close("finished", None)
            kept = EvidenceStore()
            kept.steps = {number: list(steps) for number, steps in store.steps.items()}
            kept.n_bytes, kept.n_bare = store.n_bytes, store.n_bare
            runner, budget = session.rule_runner, AuditBudget(AuditOptions())
            verdicts = audit_session(store, session.recorder, runner, budget)
        writer.close("finished")
        readers.append(open_trace(path))
        return kept, verdicts, readers[-1]

    yield run
    for reader in readers:
        reader.close()


def quantities(store: EvidenceStore) -> list[set[str]]:
    named = [{name for name, _ in one.values} for one in store.steps[0]]
    return [names & ALL for names in named]


def test_the_first_steps_keep_everything_and_later_ones_the_hidden_states(
    watching: Watching,
) -> None:
    store, verdicts, _ = watching(make_model("llama"), decode)
    found = quantities(store)
    n_full = found.index(FEWER)
    assert FULL_STEPS <= n_full < N_STEPS - 2
    assert found == [ALL] * n_full + [FEWER] * (N_STEPS - n_full)
    assert [(one.n_steps, one.divergence) for one in verdicts] == [(N_STEPS, None)]


def test_after_a_change_of_path_everything_is_kept_again(watching: Watching) -> None:
    model = make_model("llama")

    def change(step: int) -> None:
        if step == N_STEPS - 3:
            model.set_attn_implementation("eager")

    store, verdicts, _ = watching(model, lambda model: decode(model, on_step=change))
    found = quantities(store)
    assert found[N_STEPS - 4 :] == [FEWER, FEWER, ALL, ALL]
    assert verdicts[0].divergence is None


def test_a_new_generation_keeps_everything_again(watching: Watching) -> None:
    def twice(model: Any) -> None:
        decode(model)
        decode(model, 2)

    store, _, _ = watching(make_model("llama"), twice)
    assert [{name for name, _ in one.values} >= ALL for one in store.steps[1]] == [True, True]


def test_an_evicted_model_leaves_no_hook(watching: Watching) -> None:
    model = make_model("llama")
    watching(model, lambda model: decode(model, 3))
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert hooks == []


def test_a_fault_that_begins_in_a_late_step_is_named_there(watching: Watching) -> None:
    model = make_model("llama")

    def thin(step: int) -> None:
        for block in model.model.layers:
            block.self_attn.scaling = 1.0 if step == N_STEPS - 2 else 12**-0.5

    _, verdicts, reader = watching(model, lambda model: decode(model, on_step=thin))
    [found] = [one for one in reader.findings() if one.id == "audit.reproduced"]
    assert (found.step, found.layer) == (N_STEPS - 2, 0)
    assert "scale" in found.sentence
    assert verdicts[0].n_steps == N_STEPS


def small_store(n_steps: int) -> EvidenceStore:
    """A store that is full after about so many steps of the small model."""
    return EvidenceStore(max_bytes=40_000 + n_steps * 2_500)


def test_where_memory_ends_the_digests_of_the_trace_stand_in(watching: Watching) -> None:
    store, verdicts, reader = watching(make_model("llama"), decode, small_store(2))
    n_bare = sum(one.dtype is not None for one in store.steps[0])
    assert n_bare == store.n_bare
    assert n_bare > 3
    assert [(one.n_steps, one.divergence, one.not_judged) for one in verdicts] == [
        (N_STEPS, None, [])
    ]
    assert not [one for one in reader.findings() if one.id.startswith("audit.")]


def test_a_fault_is_named_where_only_digests_are_left(watching: Watching) -> None:
    model = make_model("llama")

    def thin(step: int) -> None:
        for block in model.model.layers:
            block.self_attn.scaling = 1.0 if step >= N_STEPS - 2 else 12**-0.5

    program: Program = lambda model: decode(model, on_step=thin)  # noqa: E731
    store, _, reader = watching(model, program, small_store(2))
    assert store.steps[0][-1].dtype is not None
    [found] = [one for one in reader.findings() if one.id == "audit.reproduced"]
    assert (found.step, found.layer) == (N_STEPS - 2, 0)


def test_without_digests_the_steps_that_do_not_fit_are_said_to_be_missing(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flexinspect_hooks.audit.evidence.trace_evidence._add_values", lambda *_args: None
    )
    store, verdicts, _ = watching(make_model("llama"), decode, small_store(2))
    first = next(one.step for one in store.steps[0] if one.dtype is not None)
    assert verdicts[0].n_steps == first
    assert verdicts[0].not_judged[0].startswith(f"from step {first} on: the steps before fill")


# -- keys and values of the cache ------------------------------------------------------------------


class Preallocated(DynamicCache):
    """Writes keys and values into tensors (1, heads, `size`, head size); layers read a part."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.made = size, dict[int, Tensor]()

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        key, value = super().update(key, value, layer, *args, **kwargs)
        shape = (2, *key.shape[:2], self.size, key.shape[3])
        table = self.made.setdefault(layer, torch.zeros(shape))
        n = key.shape[2]
        table[0, :, :, :n], table[1, :, :, :n] = key, value
        return table[0, :, :, :n], table[1, :, :, :n]


def with_cache(size: int) -> Program:
    def program(model: Any) -> None:
        rows, past = torch.tensor([ids(12, 3)]), Preallocated(size)
        for _ in range(4):
            logits = model(rows, past_key_values=past, use_cache=True).logits
            rows = logits[:, -1:].argmax(-1)

    return program


def cached_of(store: EvidenceStore) -> list[Tensor]:
    layers = [one for step in store.steps[0] for one in step.cached.values()]
    return [tensor for one in layers for tensor in (one.key, one.value)]


def alive_bytes(tensors: list[Tensor]) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values())


def test_parts_of_a_large_cache_are_copied_and_do_not_keep_it_alive(watching: Watching) -> None:
    model = make_model("llama")
    store, _, _ = watching(model, with_cache(20_000))
    tensors = cached_of(store)
    assert len(tensors) == 4 * model.config.num_hidden_layers * 2  # steps, layers, keys and values
    assert alive_bytes(tensors) == sum(one.nbytes for one in tensors)
    step = store.steps[0][0]
    assert all(one.is_intact for one in step.cached.values())
    assert torch.equal(step.cached[0].key[:, :, :12].transpose(1, 2), step.values[KEY, 0])


def test_parts_of_a_large_cache_that_are_large_themselves_are_not_kept(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_layers, "MAX_COPY", 64)
    store, _, _ = watching(make_model("llama"), with_cache(20_000))
    assert cached_of(store) == []


def test_a_storage_counts_once_and_the_limit_is_of_what_stays_alive(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_layers, "REFERENCE_BYTES", 0)
    model, program = make_model("llama"), with_cache(16)
    first, _, _ = watching(model, program)
    n_bytes, n_tensors = alive_bytes(cached_of(first)), len(cached_of(first))
    assert n_tensors == 4 * model.config.num_hidden_layers * 2
    for limit, n_kept in ((n_bytes + 1, n_tensors), (n_bytes // 2, 0)):
        monkeypatch.setattr(cached_layers, "MAX_BYTES", limit)
        store, _, _ = watching(model, program)
        assert len(cached_of(store)) == n_kept


def test_tensors_of_inference_mode_are_not_kept(watching: Watching) -> None:
    def program(model: Any) -> None:
        with torch.inference_mode():
            decode(model, 3)

    store, _, _ = watching(make_model("llama"), program)
    assert cached_of(store) == []
