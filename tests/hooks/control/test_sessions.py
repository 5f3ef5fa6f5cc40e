"""Sessions at the gate: they pause before a step is opened, and obey another level at the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from support.controlled import PATIENCE_S, wait_for
from support.tiny import ids, make_model
from transformers import DynamicCache

import flexinspect
from flexinspect.control.client import ControlClient
from flexinspect.control.discovery import find_capture
from flexinspect.control.messages import StepRef
from flexinspect.core.errors import ControlError, UsageError
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.sessions.session_levels import SessionLevels

NEW = 8
PAUSE_S = 1.0


class Looping:
    """A loop of a user's own in a thread, over a watched model that takes commands."""

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
                fed, cache = torch.tensor([ids(9, 3)]), DynamicCache(config=self.model.config)
                for _ in range(NEW):
                    out = self.model(fed, past_key_values=cache, use_cache=True)
                    fed = out.logits[:, -1:].argmax(-1)
        except BaseException as error:
            self.error = error

    def start(self) -> ControlClient:
        """Start the loop, paused before its first step; returns its client."""
        self._thread.start()
        wait_for(lambda: self._is_found())
        client = ControlClient(find_capture().address)
        client.pause()
        self.go.set()
        wait_for(lambda: client.status().state == "paused")
        return client

    def _is_found(self) -> bool:
        from flexinspect.control.discovery import running

        return bool(running())

    def end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def after(client: ControlClient, command: Callable[[], Any]) -> StepRef:
    """Send a command and return where the model pauses."""
    command()
    wait_for(lambda: client.status().state == "paused")
    return client.status().place


def test_a_paused_loop_shows_every_step_up_to_the_pause_and_goes_on_as_told(tmp_path: Path) -> None:
    loop = Looping(tmp_path / "own.flextrace")
    client = loop.start()
    assert client.status().place == StepRef(0, 0, -1)
    assert after(client, lambda: client.step(3)) == StepRef(0, 0, 2)
    with TraceReader(tmp_path / "own.flextrace") as reader:
        assert [step.step for step in reader.steps(0)] == [0, 1, 2]
        assert reader.tokens(0)[-1].step == 2
    assert after(client, lambda: client.run_to(5)) == StepRef(0, 0, 5)
    with pytest.raises(ControlError, match="Step 4 of generation 0 is behind"):
        client.run_to(4)
    client.continue_()
    loop.end()
    assert loop.error is None
    with pytest.raises(ControlError):
        client.status()
    with TraceReader(tmp_path / "own.flextrace") as reader:
        kinds = [row.event.kind for row in reader.events() if row.event.kind != "phase"]
        assert kinds.count("paused") == kinds.count("continued") == 3
        assert len(reader.steps(0)) == NEW


def test_time_at_the_gate_belongs_to_no_step(tmp_path: Path) -> None:
    loop = Looping(tmp_path / "own.flextrace")
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


def test_another_level_is_obeyed_from_the_next_step_on_and_said(tmp_path: Path) -> None:
    loop = Looping(tmp_path / "own.flextrace")
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
        hidden = [sorted(layer for name, layer in found if name == "hidden") for found in streams]
        assert hidden == [[], [], [1], [1], [], [], [], []]
        said = [row.event for row in reader.events() if row.event.kind == "level"]
        assert [(event.step, event.text) for event in said] == [
            (2, "level extreme from step 2 on, basic before"),
            (2, "activations of 1 layers are stored from step 2 on"),
            (4, "level basic from step 4 on, extreme before"),
        ]


def test_a_stop_ends_a_loop_as_ctrl_c_does(tmp_path: Path) -> None:
    loop = Looping(tmp_path / "own.flextrace")
    client = loop.start()
    after(client, client.step)
    assert client.stop().message == "the run ends"
    loop.end()
    assert isinstance(loop.error, KeyboardInterrupt)
    with TraceReader(tmp_path / "own.flextrace") as reader:
        assert reader.generation(0).state == "interrupted"
        assert [step.step for step in reader.steps(0)] == [0]


def test_a_loop_of_ones_own_is_not_put_back(tmp_path: Path) -> None:
    loop = Looping(tmp_path / "own.flextrace")
    client = loop.start()
    with pytest.raises(ControlError, match="the program's own"):
        client.restore(StepRef(0, 0, 0))
    with pytest.raises(ControlError, match="is no number"):
        client.layers("x")
    with pytest.raises(ControlError, match="does not exist"):
        client.layers("99")
    client.continue_()
    loop.end()


def test_a_session_that_comes_late_takes_the_level_that_was_asked_for() -> None:
    levels = SessionLevels("basic")
    levels.set_level("extreme")
    with pytest.raises(UsageError, match="There is no level loud"):
        levels.set_level("loud")
    assert levels.level == "extreme"


def test_a_session_may_come_while_another_level_is_passed_on() -> None:
    class Session:
        """Of a model that is found in a thread of its own."""

        level = ""

        def switch(self, *, level: str) -> None:
            self.level = level

    class Slowly(WeakSet[Any]):
        """In which somebody else may come between two."""

        def __iter__(self) -> Iterator[Any]:
            for one in super().__iter__():
                coming.start()
                coming.join(0.1)  # it came already, or waits until all are told
                yield one

    levels, first, late = SessionLevels("basic"), Session(), Session()
    levels._sessions = Slowly()
    coming = threading.Thread(target=lambda: levels.attach(late))  # type: ignore[arg-type]
    levels.attach(first)  # type: ignore[arg-type]
    levels.set_level("extreme")
    coming.join()
    assert (first.level, late.level) == ("extreme", "extreme")
