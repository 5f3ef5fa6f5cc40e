"""`flexinspect ctl`: commands to a run that goes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.commands.numbers import positive_int
from flexinspect.commands.open import non_negative_int
from flexinspect.text import escape_unprintable

if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import CommandResponse, StepRef

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


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ctl",
        help="pause, step, stop and change a run that goes on",
        description="Command a capture that runs: the only one, or the one that is named.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    from flexinspect.commands.maskflags import add_edit_flags, edits_of

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
    from flexinspect.control.choosing import capture_address
    from flexinspect.control.client import ControlClient
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
    from flexinspect.control.waiting import wait_for_effect
    from flexinspect.errors import ControlError

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
    from flexinspect.commands.ctlwords import response_lines
    from flexinspect.control.codec import to_json

    if as_json:
        data = [to_json(one) for one in answer] if isinstance(answer, list) else to_json(answer)
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return
    for line in response_lines(answer):
        print(escape_unprintable(line))
