"""`flexinspect ctl`: commands to a run that goes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.cli.flags import non_negative_int, positive_int
from flexinspect.control.messages import (
    BreakpointInfo,
    Breakpoints,
    CommandResponse,
    RewindState,
    StatusResponse,
)
from flexinspect.core.text import escape_unprintable

if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import MaskEdit, StepRef

EXAMPLES = """\
examples:
  flexinspect ctl status
  flexinspect ctl pause
  flexinspect ctl step 3
  flexinspect ctl run-to 12
  flexinspect ctl continue
  flexinspect ctl level extreme
  flexinspect ctl layers 0,3,5-7
  flexinspect ctl break add 'entropy > 3 and step > 2' --once
  flexinspect ctl break list
  flexinspect ctl restore 4 --cost        # only say what it would cost
  flexinspect ctl fork 4 --text " Lyon"
  flexinspect ctl edit 4 --drop 3 --see 5:4 --preset causal
  flexinspect ctl continue --pid 4711
  flexinspect ctl --url http://127.0.0.1:8421 stop     # token in FLEXINSPECT_TOKEN

A command is answered at once, with what will happen; "flexinspect ctl status" says when it has.
--wait waits for that. Exit codes: 0 accepted, 1 refused or not reached, 2 nothing to command.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the description and the arguments of this command."""
    parser.description = "Command a capture that runs: the only one, or the one that is named."
    parser.epilog = EXAMPLES
    _add_common_flags(parser)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_step_commands(verbs)
    _add_recording_commands(verbs)
    _add_rewind_commands(verbs)
    _add_breakpoint_commands(verbs)
    for verb in verbs.choices.values():
        _add_common_flags(verb, default=argparse.SUPPRESS)  # they may stand behind the verb too
    parser.set_defaults(run=run)


def _add_common_flags(parser: argparse.ArgumentParser, **default: Any) -> None:
    """Add the flags that every command has; `default` is for all of them."""
    add, none = parser.add_argument, {"default": None, **default}
    off: dict[str, Any] = {"action": "store_true", **({"default": False} | default)}
    add("--pid", type=int, metavar="N", help="the capture of this process", **none)
    add("--trace", type=Path, metavar="FILE", help="the capture that records this", **none)
    add("--url", help="the capture that --serve put there", **none)
    add("--token", help="of --url (default: FLEXINSPECT_TOKEN)", **none)
    add("--json", help="print the answer as JSON", **off)
    add("--wait", help="wait until the command has its effect", **off)


def _add_step_commands(verbs: Any) -> None:
    verbs.add_parser("status", help="how it stands").set_defaults(do=lambda c, a: c.status())
    verbs.add_parser("pause", help="pause after this step").set_defaults(do=lambda c, a: c.pause())
    verbs.add_parser("continue", help="go on; a run that is held ends").set_defaults(
        do=lambda c, a: c.continue_()
    )
    step = verbs.add_parser("step", help="go on for N steps, then pause")
    step.add_argument("n", metavar="N", type=positive_int, nargs="?", default=1)
    step.set_defaults(do=lambda c, a: c.step(a.n))
    run_to = verbs.add_parser("run-to", help="go on until step N has finished")
    run_to.add_argument("step", metavar="N", type=non_negative_int)
    run_to.add_argument(
        "--generation", type=non_negative_int, metavar="N", help="default: the current one"
    )
    run_to.set_defaults(do=lambda c, a: c.run_to(a.step, a.generation))
    verbs.add_parser("stop", help="end the run after this step").set_defaults(
        do=lambda c, a: c.stop()
    )


def _add_recording_commands(verbs: Any) -> None:
    level = verbs.add_parser("level", help="record at another level from the next step on")
    level.add_argument("level", choices=("basic", "advanced", "extreme"))
    level.set_defaults(do=lambda c, a: c.level(a.level))
    layers = verbs.add_parser("layers", help="whose activations level extreme stores")
    layers.add_argument("layers", metavar="0,3,5-7", help='or "all"')
    layers.set_defaults(do=lambda c, a: c.layers(a.layers))


def _add_rewind_commands(verbs: Any) -> None:
    restore = _add_rewind_parser(
        verbs, "restore", "rebuild the state after a step, and pause there"
    )
    restore.set_defaults(do=lambda c, a: c.restore(_step_ref(a), dry_run=a.cost))
    fork = _add_rewind_parser(verbs, "fork", "go on from a step with another token")
    token = fork.add_mutually_exclusive_group(required=True)
    token.add_argument("--token-id", type=non_negative_int, metavar="ID")
    token.add_argument("--text", help="what it is to say instead")
    fork.add_argument("--stay", action="store_true", help="pause at the new branch")
    fork.set_defaults(
        do=lambda c, a: c.fork(
            _step_ref(a), token_id=a.token_id, text=a.text, stay_paused=a.stay, dry_run=a.cost
        )
    )
    edit = _add_rewind_parser(verbs, "edit", "go on from a step with another mask")
    add_edit_flags(edit)
    edit.add_argument("--stay", action="store_true", help="pause at the new branch")
    edit.set_defaults(
        do=lambda c, a: c.edit_mask(_step_ref(a), edits_of(a), stay_paused=a.stay, dry_run=a.cost)
    )


def _add_rewind_parser(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    parser.add_argument("step", metavar="STEP", type=non_negative_int)
    parser.add_argument(
        "--generation", type=non_negative_int, default=None, metavar="N", help="default: current"
    )
    parser.add_argument("--branch", type=non_negative_int, metavar="N", help="default: current")
    parser.add_argument("--cost", action="store_true", help="only say what it would cost")
    parser.set_defaults(needs_place=True)
    return parser


def _add_breakpoint_commands(verbs: Any) -> None:
    parser = verbs.add_parser("break", help="breakpoints on what the model does")
    doing = parser.add_subparsers(dest="doing", metavar="WHAT", required=True)
    add = doing.add_parser("add", help="set one")
    add.add_argument("condition", metavar="CONDITION")
    add.add_argument(
        "--hits", type=non_negative_int, default=0, metavar="N", help="stop from the N-th hit on"
    )
    add.add_argument("--once", action="store_true", help="switch it off at its first stop")
    add.add_argument("--log-only", action="store_true", help="leave an event, and do not stop")
    add.set_defaults(
        do=lambda c, a: c.add_breakpoint(a.condition, hits=a.hits, once=a.once, log_only=a.log_only)
    )
    doing.add_parser("list", help="list them").set_defaults(do=lambda c, a: c.breakpoints())
    for name, text, do in _NUMBERED_COMMANDS:
        one = doing.add_parser(name, help=text)
        one.add_argument("number", metavar="NUMBER", type=non_negative_int)
        one.set_defaults(do=do)
    for one in doing.choices.values():
        _add_common_flags(one, default=argparse.SUPPRESS)


_NUMBERED_COMMANDS: tuple[
    tuple[str, str, Callable[[ControlClient, argparse.Namespace], Any]], ...
] = (
    ("remove", "remove one", lambda c, a: c.remove_breakpoint(a.number)),
    ("enable", "switch one on", lambda c, a: c.enable_breakpoint(a.number, True)),
    ("disable", "switch one off", lambda c, a: c.enable_breakpoint(a.number, False)),
)


def _step_ref(args: argparse.Namespace) -> StepRef:
    from flexinspect.control.messages import StepRef

    return StepRef(args.generation, args.branch, args.step)


def run(args: argparse.Namespace) -> int:
    """Send one command and print its answer."""
    from flexinspect.control.client import ControlClient
    from flexinspect.control.discovery import capture_address
    from flexinspect.control.messages import CommandResponse

    client = ControlClient(capture_address(args.url, args.token, args.pid, args.trace))
    if getattr(args, "needs_place", False):
        _fill_step_ref(args, client)
    answer = args.do(client, args)
    if args.wait and isinstance(answer, CommandResponse):
        return _wait_and_print(answer, client, as_json=args.json)
    _print(answer, as_json=args.json)
    return 0


def _fill_step_ref(args: argparse.Namespace, client: ControlClient) -> None:
    """Take generation and branch from where the model stands, unless they were named."""
    if args.generation is None or args.branch is None:
        place = client.status().place
        is_here = args.generation in (None, place.generation)
        args.generation = place.generation if args.generation is None else args.generation
        if args.branch is None:
            args.branch = place.branch if is_here else 0


def _wait_and_print(answer: CommandResponse, client: ControlClient, *, as_json: bool) -> int:
    from flexinspect.control.client import wait_for_effect
    from flexinspect.core.errors import ControlError

    status = wait_for_effect(client, answer)
    if status is None and answer.rewind_number is not None:
        raise ControlError(
            f"The run ended before it said what became of order {answer.rewind_number}.",
            hint="Its trace tells how far it came; --hold keeps a model for orders.",
        )
    _print(status if status is not None else answer, as_json=as_json)
    order = status.last_rewind if status is not None and answer.rewind_number is not None else None
    return 1 if order is not None and order.state == "failed" else 0


def _print(answer: Any, *, as_json: bool) -> None:
    from flexinspect.control.messages import to_json

    if as_json:
        data = [to_json(one) for one in answer] if isinstance(answer, list) else to_json(answer)
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return
    for line in response_lines(answer):
        print(escape_unprintable(line))


def response_lines(answer: Any) -> list[str]:
    """Return an answer as lines to print."""
    if isinstance(answer, StatusResponse):
        return _status_lines(answer)
    if isinstance(answer, CommandResponse):
        return [answer.message] if answer.cost is None else _cost_lines(answer)
    if isinstance(answer, BreakpointInfo):
        return [_breakpoint_line(answer)]
    found = answer.breakpoints if isinstance(answer, Breakpoints) else answer
    return [_breakpoint_line(one) for one in found] or ["no breakpoints"]


def _status_lines(status: StatusResponse) -> list[str]:
    reason = f" ({status.reason})" if status.reason else ""
    found = [
        f"{status.description}{reason}",
        f"{status.kind}  {status.title}, process {status.pid}",
        f"stands  {status.place.describe_after()}",
        f"level  {status.level}, layers {status.layers}",
    ]
    if status.n_breakpoints:
        found.append(f"breakpoints  {status.n_breakpoints}")
    if status.last_rewind is not None:
        found.append(_rewind_line(status.last_rewind))
    return [*found, f"trace  {status.trace}"]


def _rewind_line(order: RewindState) -> str:
    said = f": {order.message}" if order.message else ""
    took = f" in {order.seconds * 1e3:.0f} ms" if order.seconds is not None else ""
    return f"{order.kind} {order.number}  {order.state}{took}{said}"


def _cost_lines(answer: CommandResponse) -> list[str]:
    assert answer.cost is not None
    dear = " (dear)" if answer.cost.is_expensive else ""
    cost = f"cost: {answer.cost.sentence}{dear}"
    return [cost] if answer.rewind_number is None else [answer.message, cost]


def _breakpoint_line(one: BreakpointInfo) -> str:
    marks = [
        "" if one.is_enabled else "off",
        f"from hit {one.hits} on" if one.hits > 1 else "",
        "once" if one.once else "",
        "log only" if one.log_only else "",
        f"{one.n_hits} hit{'' if one.n_hits == 1 else 's'}" if one.n_hits else "",
        one.note,
    ]
    said = "; ".join(mark for mark in marks if mark)
    return f"{one.id:>3}  {one.text}" + (f"  [{said}]" if said else "")


def add_edit_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per kind of change."""
    flags = {
        "--preset": ("NAME", "use this mask instead"),
        "--drop": ("SEGMENT", "nobody sees this segment any more"),
        "--join": ("A,B", "these segments see each other"),
        "--see": ("A:B", "segment A sees segment B"),
        "--unsee": ("A:B", "segment A no longer sees segment B"),
        "--open": ("ROW:KEY", "this row sees this key; without a key: all keys up to itself"),
        "--close": ("ROW:KEY", "this row no longer sees this key; without a key: only itself"),
    }
    for name, (metavar, text) in flags.items():
        parser.add_argument(name, action=_EditAction, metavar=metavar, help=text, dest="edits")


def edits_of(args: argparse.Namespace) -> Sequence[MaskEdit]:
    """Return the changes that were given, in order."""
    return tuple(args.edits or ())


class _EditAction(argparse.Action):
    """Reads one flag into a `MaskEdit` and appends it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append what the flag says, or end with how it is written."""
        try:
            edit = _parse_edit(str(option_string).removeprefix("--"), str(values))
        except ValueError:
            parser.error(f"{option_string} {values} is not {self.metavar} in numbers")
        namespace.edits = [*(namespace.edits or ()), edit]


def _parse_edit(flag: str, text: str) -> MaskEdit:
    from flexinspect.control.messages import MaskEdit

    if flag == "preset":
        return MaskEdit("preset", name=text)
    if flag in ("drop", "join"):
        return MaskEdit("drop" if flag == "drop" else "join", segments=_parse_numbers(text, ","))
    if flag in ("see", "unsee"):
        first, second = _parse_numbers(text, ":")
        return MaskEdit("see", segments=(first, second), is_open=flag == "see")
    row, *rest = _parse_numbers(text, ":")
    if not rest:
        return MaskEdit("row", row=row, is_open=flag == "open")
    (key,) = rest
    return MaskEdit("cell", row=row, key=key, is_open=flag == "open")


def _parse_numbers(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(separator))
