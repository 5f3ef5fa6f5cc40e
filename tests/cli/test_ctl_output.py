"""`flexinspect ctl`: how mask edits are read, and how responses are printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flexinspect.cli.ctl import _wait_and_print, response_lines
from flexinspect.cli.main import build_parser, main
from flexinspect.control import discovery
from flexinspect.control.client import wait_for_effect
from flexinspect.control.discovery import Address, CaptureEntry, capture_address, find_capture
from flexinspect.control.messages import (
    BreakpointInfo,
    CommandResponse,
    Cost,
    MaskEdit,
    RewindState,
    StatusResponse,
    StepRef,
)
from flexinspect.core.errors import ControlError, UsageError

STATUS = StatusResponse("paused", StepRef(0, 1, 7), "paused after step 7 (branch 1)", "entropy > 3")


def test_a_capture_is_found_by_any_way_to_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, link = tmp_path / "a.flextrace", tmp_path / "link.flextrace"
    trace.touch()
    link.symlink_to(trace)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    entry = CaptureEntry(1, 0.0, Address("a.sock"), str(trace))
    monkeypatch.setattr(discovery, "running", lambda: [entry])
    for name in (trace, link, Path("../a.flextrace"), Path("../below/../link.flextrace")):
        assert find_capture(trace=name) is entry
    with pytest.raises(UsageError, match="that records other is running"):
        find_capture(trace=Path("other"))


def test_edits_are_read_in_the_order_they_are_given() -> None:
    flags = "--drop 3 --see 5:4 --unsee 4:5 --join 1,2,3 --open 9 --close 9:2 --preset causal"
    args = build_parser("ctl").parse_args(["ctl", "edit", "4", *flags.split()])
    assert args.edits == (
        MaskEdit("drop", segments=(3,)),
        MaskEdit("see", segments=(5, 4)),
        MaskEdit("see", segments=(4, 5), is_open=False),
        MaskEdit("join", segments=(1, 2, 3)),
        MaskEdit("row", row=9),
        MaskEdit("cell", row=9, key=2, is_open=False),
        MaskEdit("preset", name="causal"),
    )


@pytest.mark.parametrize("flags", ["--see 5", "--drop x", "--open 1:2:3", "--join 1,", "--unsee :"])
def test_an_edit_that_cannot_be_read_says_its_form(flags: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        main(["ctl", "edit", "4", *flags.split()])
    assert end.value.code == 2
    assert "is not" in capsys.readouterr().err


class Vanishing:
    """A client whose capture no longer answers."""

    def __init__(self, error: ControlError) -> None:
        self._error = error

    def status(self) -> StatusResponse:
        raise self._error


def test_a_rewind_that_the_run_ends_before_fails() -> None:
    order = RewindState(2, "fork", "waiting")
    going = StatusResponse("running", StepRef(0, 0, 7), "running", last_rewind=order)
    gone: Any = Vanishing(ControlError("No capture answers."))
    with pytest.raises(ControlError, match="ended before it reported the result of command 2"):
        _wait_and_print(CommandResponse("the fork waits", going, 2), gone, as_json=False)
    assert (
        _wait_and_print(
            CommandResponse("pausing", replace(going, until="x"), None), gone, as_json=False
        )
        == 0
    )


@pytest.mark.parametrize(
    ("kind", "state"), [("restore", "done"), ("fork", "done"), ("edit", "done"), ("fork", "failed")]
)
def test_a_rewind_is_waited_for_until_the_pause_that_it_ends_in(kind: Any, state: Any) -> None:
    class Pausing:
        looks = 0

        def status(self) -> StatusResponse:
            self.looks += 1
            return STATUS if self.looks > 1 else going

    going = replace(
        STATUS,
        state="pausing",
        until="after this step",
        last_rewind=RewindState(2, kind, state),
    )
    client: Any = Pausing()
    status = wait_for_effect(client, CommandResponse("the order waits", going, 2))
    assert status is not None
    assert (status.state, client.looks) == ("paused", 2)


def test_an_unresponsive_capture_has_not_ended() -> None:
    silent = ControlError("It does not answer.")
    silent.__cause__ = TimeoutError()
    client: Any = Vanishing(silent)
    going = StatusResponse("running", StepRef(0, 0, 7), "running", until="after step 9")
    with pytest.raises(ControlError, match="does not answer"):
        wait_for_effect(client, CommandResponse("pausing", going))


def test_responses_are_printed_as_text() -> None:
    assert response_lines(CommandResponse("going on", STATUS)) == ["going on"]
    cost = Cost("40 rows in one forward", 0.2, 4096, True)
    assert response_lines(CommandResponse("x", STATUS, None, cost)) == [
        "cost: 40 rows in one forward (expensive)"
    ]
    assert response_lines(STATUS)[0] == "paused after step 7 (branch 1) (entropy > 3)"
    order = RewindState(2, "fork", "failed", "No such step.", StepRef(0, 0, 7), 0.0123)
    lines = response_lines(
        StatusResponse("paused", StepRef(0, 0, 7), "paused after step 7", last_rewind=order)
    )
    assert "fork 2  failed in 12 ms: No such step." in lines
    assert response_lines(()) == ["no breakpoints"]
    one = BreakpointInfo(3, "prob < 0.1", False, 2, True, True, 1, "after each step")
    assert response_lines(one) == [
        "  3  prob < 0.1  [off; from hit 2 on; once; log only; 1 hit; after each step]"
    ]


def test_a_capture_is_named_in_one_way() -> None:
    with pytest.raises(UsageError, match="--token goes with --url"):
        capture_address(None, "t", None, None)
    with pytest.raises(UsageError, match="already selects the capture"):
        capture_address("http://127.0.0.1:1", None, 7, None)
    assert capture_address("http://127.0.0.1:1", "t", None, None).token == "t"


@pytest.mark.parametrize(
    "line", ["--pid 5 stop", "stop --pid 5", "step 3 --pid 5", "break list --pid 5"]
)
def test_a_capture_is_named_before_or_after_the_verb(line: str) -> None:
    from flexinspect.cli.main import build_parser

    args = build_parser("ctl").parse_args(["ctl", *line.split()])
    assert (args.pid, args.json, args.wait, args.trace) == (5, False, False, None)
