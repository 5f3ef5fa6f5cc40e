"""`run --check-every`: steps with a cache against a recompute without one, by another kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.branching import branching_run, prompt_of
from support.tiny import make_model
from torch import Tensor

from flexinspect.cli.main import build_parser
from flexinspect.cli.run import checked_job
from flexinspect.core.errors import MaskError, UsageError
from flexinspect.records.finding import Finding
from flexinspect.records.job import Job
from flexinspect.records.step import EventRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.numerics.recompute_checks import RecomputeRule
from flexinspect_hooks.ensemble import recompute_check
from flexinspect_hooks.ensemble.recompute_check import CheckCost, RecomputeCheck
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.gradients.after_generation import GradientPatch


class FakeSession:
    """What a check uses of a session: a queue of events, and a pause of the capture."""

    def __init__(self) -> None:
        self.events: list[EventRecord] = []
        self.recorder = self

    def put(self, event: EventRecord) -> None:
        self.events.append(event)

    def no_capture(self) -> Any:
        return nullcontext()


def checked(
    family: str = "llama",
    *,
    every: int = 2,
    n_new: int = 6,
    before_step: Callable[[int, Any], None] = lambda step, run: None,
    **overrides: Any,
) -> tuple[list[EventRecord], CheckCost, list[int]]:
    """Generate with checks; return the events, their cost and the tokens."""
    model, prompt = make_model(family, **overrides), prompt_of(n_new)
    session, cost = FakeSession(), CheckCost()
    with branching_run(model, prompt) as run:
        check = RecomputeCheck(
            model,
            prompt,
            session,
            (0, every),
            compiled=False,
            cost=cost,  # type: ignore[arg-type]
        )
        with check.watching():
            while not run.branching.is_over:
                before_step(run.decoder.step, run)
                run.branching.advance()
                check.on_step(run.branching)
    return session.events, cost, list(run.decoder.token_ids)


def findings_of(events: list[EventRecord]) -> list[Finding]:
    rule = RecomputeRule()
    rule.on_generation_start(RuleContext())
    return [finding for event in events for finding in rule.on_event(event)]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_neox"])
def test_sound_steps_agree_with_a_recompute_in_every_layer(family: str) -> None:
    events, cost, _ = checked(family)
    assert [event.step for event in events] == [0, 2, 4]
    for event in events:
        assert event.data["layers"] == [0, 1, 2]
        errors, limits = (np.array(event.data[name]) for name in ("errors", "limits"))
        assert (errors <= limits).all()
    assert findings_of(events) == []
    assert cost.n == 3
    assert cost.seconds >= sum(event.data["ms"] for event in events) / 1e3 - 1e-3


def test_checks_change_no_token() -> None:
    assert checked(every=1)[2] == checked(every=100)[2]


def damage_cache(step: int, run: Any) -> None:
    """Swap two cached keys of layer 1 before step 3."""
    if step == 3:
        keys = run.decoder.cache.layers[1].keys
        keys[:, :, [4, 25]] = keys[:, :, [25, 4]].clone()


def test_a_damaged_cache_is_found_in_its_layer_and_told_from_the_kernel() -> None:
    events, _, _ = checked(every=1, before_step=damage_cache)
    errors = {event.step: event.data["errors"] for event in events}
    assert max(errors[2]) < 1e-5 < errors[3][1]
    first = findings_of(events)[0]
    assert (first.id, first.step, first.layer) == ("cache.recompute", 3, 1)
    assert "without the cache the kernel and the dense reference agree" in first.sentence
    assert first.evidence["without_cache"] < 1e-5


def test_a_kernel_that_is_wrong_is_found_in_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = FlexPatch._flex

    def wrong(self: Any, qkv: Any, *rest: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = inner(self, qkv, *rest)
        return out * (1 if isinstance(self, GradientPatch) else 1.05), lse

    monkeypatch.setattr(FlexPatch, "_flex", wrong)
    found = findings_of(checked()[0])
    assert (found[0].id, found[0].step, found[0].layer) == ("numbers.kernel", 0, 0)
    assert "flex uncompiled" in found[0].sentence
    assert {one.id for one in found} == {"numbers.kernel"}


def test_a_kernel_that_is_wrong_in_decode_steps_only_is_no_fault_of_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = FlexPatch._flex

    def wrong(self: Any, qkv: Any, *rest: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = inner(self, qkv, *rest)
        is_right = isinstance(self, GradientPatch) or qkv[0].shape[2] == 30
        return out * (1 if is_right else 1.05), lse

    monkeypatch.setattr(FlexPatch, "_flex", wrong)
    (found, *_) = findings_of(checked()[0])
    assert (found.id, found.step) == ("numbers.kernel", 2)


def test_a_recompute_that_fails_ends_the_checks_and_not_the_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MaskError("The mask is too large.")

    monkeypatch.setattr(recompute_check, "GradientPatch", fail)
    events, _, tokens = checked()
    assert [event.kind for event in events] == ["recompute-check-failed"]
    assert "Steps are not recomputed from step 0 on: " in events[0].text
    assert len(tokens) == 6


def test_the_limits_are_those_of_the_dtype() -> None:
    torch.manual_seed(0)
    events, _, _ = checked(torch_dtype=torch.float32)
    assert events[0].data["limits"] == [4e-4] * 3
    assert events[1].data["limits"] == [1e-4] * 3


def test_the_flag_travels_with_the_job_and_goes_with_no_program() -> None:
    parser = build_parser("run")
    job = checked_job(parser.parse_args(["run", "--check-every", "8"]))
    assert isinstance(job, Job)
    assert (job.check_every, Job.from_json(job.to_json()).check_every) == (8, 8)
    with pytest.raises(UsageError, match="--check-every applies to generations of flexinspect"):
        checked_job(parser.parse_args(["run", "--check-every", "8", "script.py"]))
