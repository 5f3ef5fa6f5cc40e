"""Sessions and the step barrier: they pause before a step, and a new level applies to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.controlled import wait_for
from support.patience import PATIENCE_S
from support.tiny import ids, make_model
from transformers import DynamicCache

import flexinspect
from flexinspect.control.client import ControlClient
from flexinspect.control.discovery import find_capture, running
from flexinspect.control.messages import Restore, StepRef
from flexinspect.core.errors import ControlError, UsageError
from flexinspect.records.step import GenerationRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.control.control_protocols import SessionLevels
from flexinspect_hooks.sessions.capture_session import CaptureSession

NEW = 8
PAUSE_S = 1.0


class UserLoop:
    """A user's own loop in a thread, over a watched model that can be controlled."""

    def __init__(self, out: Path, level: str = "basic") -> None:
        self.model = make_model("llama")
        self.watch = flexinspect.watch(self.model, out=out, level=level, control=True)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.go = threading.Event()

    def _run(self) -> None:
        try:
            with self.watch:
                self.go.wait(PATIENCE_S)
                input_ids, cache = torch.tensor([ids(9, 3)]), DynamicCache(config=self.model.config)
                for _ in range(NEW):
                    out = self.model(input_ids, past_key_values=cache, use_cache=True)
                    input_ids = out.logits[:, -1:].argmax(-1)
        except BaseException as error:
            self.error = error

    def start(self) -> ControlClient:
        """Start the loop, paused before its first step; returns its client."""
        self._thread.start()
        wait_for(lambda: bool(running()))
        client = ControlClient(find_capture().address)
        client.pause()
        self.go.set()
        wait_for(lambda: client.status().state == "paused")
        return client

    def end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def after(client: ControlClient, command: Callable[[], Any]) -> StepRef:
    """Send a command and return where the model pauses."""
    command()
    wait_for(lambda: client.status().state == "paused")
    return client.status().place


def test_a_paused_loop_has_written_every_step_and_continues_on_command(tmp_path: Path) -> None:
    loop = UserLoop(tmp_path / "own.flextrace")
    client = loop.start()
    assert client.status().place == StepRef(0, 0, -1)
    assert after(client, lambda: client.step(3)) == StepRef(0, 0, 2)
    with TraceReader(tmp_path / "own.flextrace") as reader:
        assert [step.step for step in reader.steps(0)] == [0, 1, 2]
        assert reader.tokens(0)[-1].step == 2
    assert after(client, lambda: client.run_to(5)) == StepRef(0, 0, 5)
    with pytest.raises(ControlError, match="Step 4 of generation 0 has already finished"):
        client.run_to(4)
    client.continue_()
    loop.end()
    assert loop.error is None
    with pytest.raises(ControlError):
        client.status()
    with TraceReader(tmp_path / "own.flextrace") as reader:
        kinds = [row.event.kind for row in reader.events() if row.event.kind != "phase"]
        assert kinds.count("paused") == kinds.count("resumed") == 3
        assert len(reader.steps(0)) == NEW


def test_paused_time_belongs_to_no_step(tmp_path: Path) -> None:
    loop = UserLoop(tmp_path / "own.flextrace")
    client = loop.start()
    after(client, client.step)
    time.sleep(PAUSE_S)
    after(client, client.step)
    client.continue_()
    loop.end()
    with TraceReader(tmp_path / "own.flextrace") as reader:
        first, second = reader.steps(0)[:2]
        between = second.started_at - (first.started_at + first.wall_ms / 1e3)
        assert between > PAUSE_S
        assert second.capture_ms < PAUSE_S * 1e3


def test_a_new_level_applies_from_the_next_step_on_and_is_recorded(tmp_path: Path) -> None:
    loop = UserLoop(tmp_path / "own.flextrace")
    client = loop.start()
    after(client, lambda: client.step(2))
    client.level("extreme")
    client.layers("1")
    after(client, lambda: client.step(2))
    client.level("basic")
    client.continue_()
    loop.end()
    with TraceReader(tmp_path / "own.flextrace") as reader:
        streams = [{(a.stream, a.layer) for a in reader.arrays(0, n)} for n in range(NEW)]
        hidden = [sorted(layer for name, layer in arrays if name == "hidden") for arrays in streams]
        assert hidden == [[], [], [1], [1], [], [], [], []]
        events = [row.event for row in reader.events() if row.event.kind == "level"]
        assert [(event.step, event.text) for event in events] == [
            (2, "level extreme from step 2 on, basic before"),
            (2, "activations of 1 layers are stored from step 2 on"),
            (4, "level basic from step 4 on, extreme before"),
        ]


def test_a_stop_ends_a_loop_as_ctrl_c_does(tmp_path: Path) -> None:
    loop = UserLoop(tmp_path / "own.flextrace")
    client = loop.start()
    after(client, client.step)
    assert client.stop().message == "the run ends"
    loop.end()
    assert isinstance(loop.error, KeyboardInterrupt)
    with TraceReader(tmp_path / "own.flextrace") as reader:
        assert reader.generation(0).state == "interrupted"
        assert [step.step for step in reader.steps(0)] == [0]


def test_a_users_own_loop_cannot_be_restored(tmp_path: Path) -> None:
    loop = UserLoop(tmp_path / "own.flextrace")
    client = loop.start()
    with pytest.raises(ControlError, match="the program's own"):
        client.rewind(Restore(StepRef(0, 0, 0)))
    with pytest.raises(ControlError, match="is not a number"):
        client.layers("x")
    with pytest.raises(ControlError, match="does not exist"):
        client.layers("99")
    client.continue_()
    loop.end()


def test_a_level_set_before_any_session_is_checked_and_kept() -> None:
    levels = SessionLevels("basic")
    levels.set_level("extreme")
    with pytest.raises(UsageError, match="There is no level loud"):
        levels.set_level("loud")
    assert levels.level == "extreme"


def test_a_session_attached_after_a_level_change_gets_the_new_level(tmp_path: Path) -> None:
    levels, model = SessionLevels("basic"), make_model("llama")
    levels.set_level("extreme")
    levels.set_layers("1")
    writer = TraceWriter.create(tmp_path / "late.flextrace", {})
    with CaptureSession(model, writer, level="basic") as session:
        session.use_levels(levels)
        session.begin_generation(GenerationRecord(0, "late", "not declared", "contiguous", (), ()))
        model(torch.tensor([ids(9, 3)]))
        assert session._step is not None
        assert (session.level, session._step.level, session.context.layers) == (
            "extreme",
            "extreme",
            (1,),
        )
        texts = [text for _, text, *_ in session._step.events]
        assert "level extreme from step 0 on, basic before" in texts
        levels.set_level("advanced")
        model(torch.tensor([ids(9, 3)]))
        assert session._step.level == "advanced"
    writer.close("finished")
