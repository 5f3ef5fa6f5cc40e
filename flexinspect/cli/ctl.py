"""`flexinspect ctl`: send commands to a running capture."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexinspect.cli.flags import add_number_flags, add_switches, non_negative_int, positive_int
from flexinspect.cli.output import print_json, print_lines
from flexinspect.control import messages
from flexinspect.control.client import ControlClient, wait_for_effect
from flexinspect.control.discovery import capture_address
from flexinspect.core.errors import ControlError
from flexinspect.core.text import plural

DESCRIPTION = "Send a command to a running capture: the only one, or the selected one."
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
  flexinspect ctl restore 4 --cost        # only print what it would cost
  flexinspect ctl fork 4 --text " Lyon"
  flexinspect ctl edit 4 --drop 3 --see 5:4 --preset causal
  flexinspect ctl continue --pid 4711
  flexinspect ctl --url http://127.0.0.1:8421 stop     # token in FLEXINSPECT_TOKEN

A command returns at once with what will happen; "flexinspect ctl status" shows when it has
happened, and --wait waits for it. Exit codes: 0 accepted, 1 refused or not reached, 2 no running
capture.
"""


Do = Callable[[ControlClient, argparse.Namespace], Any]  # sends a command

_EDIT_FLAGS = {
    "--preset": ("NAME", "use this mask instead"),
    "--drop": ("SEGMENT", "no other segment attends to this segment any more"),
    "--join": ("A,B", "these segments attend to each other"),
    "--see": ("A:B", "segment A attends to segment B"),
    "--unsee": ("A:B", "segment A no longer attends to segment B"),
    "--open": ("ROW:KEY", "this row attends to this key, or without KEY to all keys up to itself"),
    "--close": ("ROW:KEY", "this row no longer attends to this key, or without KEY only to itself"),
}
"""One flag for each kind of mask edit, with its value and its help."""


def configure(parser: argparse.ArgumentParser) -> None:
    _add_common_flags(parser)
    verbs = add_verbs(parser)
    for verb in verbs.choices.values():
        _add_common_flags(verb, default=argparse.SUPPRESS)  # accepted after the verb too


def add_verbs(parser: argparse.ArgumentParser) -> Any:
    """Add the commands and return them; `do` of the parsed arguments sends one."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_step_commands(verbs)
    _add_rewind_commands(verbs)
    _add_breakpoint_commands(verbs)
    return verbs


def _add_common_flags(parser: argparse.ArgumentParser, **default: Any) -> None:
    """Add the flags of every command; `default`, if given, is the default of all of them."""
    add, unset = parser.add_argument, {"default": None, **default}
    switch: dict[str, Any] = {"action": "store_true", "default": False, **default}
    add("--pid", type=int, metavar="N", help="the capture of this process", **unset)
    add("--trace", type=Path, metavar="FILE", help="the capture that records this trace", **unset)
    add("--url", help="the capture that serves this URL (run --serve)", **unset)
    add("--token", help="the token of --url (default: FLEXINSPECT_TOKEN)", **unset)
    add("--json", help="print the response as JSON", **switch)
    add("--wait", help="wait until the command has its effect", **switch)


def _add_verb(verbs: Any, name: str, text: str, do: Do) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    parser.set_defaults(do=do)
    return parser


def _add_step_commands(verbs: Any) -> None:
    _add_verb(verbs, "status", "show the state of the capture", lambda c, a: c.status())
    _add_verb(verbs, "pause", "pause after this step", lambda c, a: c.pause())
    _add_verb(verbs, "continue", "continue; end a run kept by --hold", lambda c, a: c.continue_())
    step = _add_verb(verbs, "step", "run N steps, then pause", lambda c, a: c.step(a.n))
    step.add_argument("n", metavar="N", type=positive_int, nargs="?", default=1)
    until = "run until step N has finished"
    run_to = _add_verb(verbs, "run-to", until, lambda c, a: c.run_to(a.step, a.generation))
    run_to.add_argument("step", metavar="N", type=non_negative_int)
    add_number_flags(run_to, generation="default: the current one")
    _add_verb(verbs, "stop", "end the run after this step", lambda c, a: c.stop())
    text = "record at another level from the next step on"
    level = _add_verb(verbs, "level", text, lambda c, a: c.level(a.level))
    level.add_argument("level", choices=("basic", "advanced", "extreme"))
    text = "the layers whose activations level extreme stores"
    layers = _add_verb(verbs, "layers", text, lambda c, a: c.layers(a.layers))
    layers.add_argument("layers", metavar="0,3,5-7", help='or "all"')


def _add_rewind_commands(verbs: Any) -> None:
    texts: dict[type[messages.RewindCommand], str] = {
        messages.Restore: "restore the state after a step, and pause there",
        messages.Fork: "continue from a step with another token",
        messages.EditMask: "continue from a step with another mask",
    }
    for command, text in texts.items():
        parser = _add_verb(verbs, command.kind, text, _rewind)
        parser.set_defaults(command_type=command)
        parser.add_argument("step", metavar="STEP", type=non_negative_int)
        add_number_flags(parser, generation="default: current", branch="default: current")
        add_switches(parser, cost="only print what it would cost")
        if command is not messages.Restore:
            add_switches(parser, stay="pause at the new branch")
    token = verbs.choices["fork"].add_mutually_exclusive_group(required=True)
    token.add_argument("--token-id", type=non_negative_int, metavar="ID", help="the token to force")
    token.add_argument("--text", help="the text to force instead")
    for name, (metavar, text) in _EDIT_FLAGS.items():
        options = {"action": _EditAction, "metavar": metavar, "dest": "edits", "default": ()}
        verbs.choices["edit"].add_argument(name, help=text, **options)


def _rewind(client: ControlClient, args: argparse.Namespace) -> messages.CommandResponse:
    """Send a restore, fork or edit; generation and branch are those of the model by default."""
    generation, branch = args.generation, args.branch
    if generation is None or branch is None:
        place = client.status().place
        generation = place.generation if generation is None else generation
        if branch is None:
            branch = place.branch if generation == place.generation else 0
    flags = {"token_id": "token_id", "text": "text", "edits": "edits", "stay_paused": "stay"}
    given = {field: getattr(args, flag) for field, flag in flags.items() if hasattr(args, flag)}
    step = messages.StepRef(generation, branch, args.step)
    return client.rewind(args.command_type(step, dry_run=args.cost, **given))


def _add_breakpoint_commands(verbs: Any) -> None:
    parser = verbs.add_parser("break", help="list, set and remove breakpoints")
    actions = parser.add_subparsers(dest="doing", metavar="WHAT", required=True)

    def add_breakpoint(client: ControlClient, args: argparse.Namespace) -> Any:
        options = {"hits": args.hits or 0, "once": args.once, "log_only": args.log_only}
        return client.add_breakpoint(args.condition, **options)

    add = _add_verb(actions, "add", "set a breakpoint", add_breakpoint)
    add.add_argument("condition", metavar="CONDITION")
    add_number_flags(add, hits="stop from the N-th hit on")
    once, log = "disable it after its first stop", "record an event instead of stopping"
    add_switches(add, once=once, log_only=log)
    _add_verb(actions, "list", "list the breakpoints", lambda c, a: c.breakpoints())
    numbered: dict[str, Do] = {
        "remove": lambda c, a: c.remove_breakpoint(a.number),
        "enable": lambda c, a: c.enable_breakpoint(a.number, True),
        "disable": lambda c, a: c.enable_breakpoint(a.number, False),
    }
    for name, do in numbered.items():
        action = _add_verb(actions, name, f"{name} a breakpoint", do)
        action.add_argument("number", metavar="NUMBER", type=non_negative_int)
    for action in actions.choices.values():
        _add_common_flags(action, default=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Send the command and print the response."""
    client = ControlClient(capture_address(args.url, args.token, args.pid, args.trace))
    response = args.do(client, args)
    if args.wait and isinstance(response, messages.CommandResponse):
        return _wait_and_print(response, client, as_json=args.json)
    _print(response, as_json=args.json)
    return 0


def _wait_and_print(
    response: messages.CommandResponse, client: ControlClient, *, as_json: bool
) -> int:
    """Wait until a command has its effect and print the status; return 1 for a failed rewind."""
    status, number = wait_for_effect(client, response), response.rewind_number
    if status is None and number is not None:
        text = f"The run ended before it reported the result of command {number}."
        hint = "Its trace shows how far it came; --hold keeps the model for further commands."
        raise ControlError(text, hint=hint)
    _print(status if status is not None else response, as_json=as_json)
    rewind = status.last_rewind if status is not None and number is not None else None
    return 1 if rewind is not None and rewind.state == "failed" else 0


def _print(response: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(messages.to_json(response))
    else:
        print_lines(response_lines(response))


def response_lines(response: Any) -> list[str]:
    """Return a response as lines of text."""
    if isinstance(response, messages.StatusResponse):
        return _status_lines(response)
    if isinstance(response, messages.CommandResponse):
        if (cost := response.cost) is None:
            return [response.message]
        line = f"cost: {cost.sentence}{' (expensive)' if cost.is_expensive else ''}"
        return [line] if response.rewind_number is None else [response.message, line]
    if isinstance(response, messages.BreakpointInfo):
        return [_breakpoint_line(response)]
    return [_breakpoint_line(one) for one in response] or ["no breakpoints"]


def _status_lines(status: messages.StatusResponse) -> list[str]:
    reason = f" ({status.reason})" if status.reason else ""
    lines = [
        f"{status.description}{reason}",
        f"{status.kind}  {status.title}, process {status.pid}",
        f"place  {status.place.describe_after()}",
        f"level  {status.level}, layers {status.layers}",
    ]
    if status.n_breakpoints:
        lines.append(f"breakpoints  {status.n_breakpoints}")
    if (rewind := status.last_rewind) is not None:
        message = f": {rewind.message}" if rewind.message else ""
        duration = f" in {rewind.seconds * 1e3:.0f} ms" if rewind.seconds is not None else ""
        lines.append(f"{rewind.kind} {rewind.number}  {rewind.state}{duration}{message}")
    return [*lines, f"trace  {status.trace}"]


def _breakpoint_line(info: messages.BreakpointInfo) -> str:
    notes = [
        "" if info.is_enabled else "off",
        f"from hit {info.hits} on" if info.hits > 1 else "",
        "once" if info.once else "",
        "log only" if info.log_only else "",
        plural(info.n_hits, "hit") if info.n_hits else "",
        info.note,
    ]
    text = "; ".join(filter(None, notes))
    return f"{info.id:>3}  {info.text}" + (f"  [{text}]" if text else "")


class _EditAction(argparse.Action):
    """Converts the value of a flag to a `MaskEdit` and appends it to `edits`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Append the edit, or end the command with an error of the parser."""
        try:
            edit = _parse_edit(option_string.removeprefix("--"), values)
        except ValueError:
            parser.error(f"{option_string} {values} is not of the form {self.metavar}, in numbers")
        namespace.edits = (*namespace.edits, edit)


def _parse_edit(flag: str, text: str) -> messages.MaskEdit:
    """Return the edit of a flag. Raises `ValueError` for text of another form."""
    if flag == "preset":
        return messages.MaskEdit("preset", name=text)
    numbers = tuple(map(int, text.split("," if flag in ("drop", "join") else ":")))
    match flag, len(numbers):
        case ("drop" | "join") as op, _:
            return messages.MaskEdit(op, segments=numbers)
        case (("see" | "unsee"), 2):
            return messages.MaskEdit("see", segments=numbers, is_open=flag == "see")
        case (("open" | "close"), 1):
            return messages.MaskEdit("row", row=numbers[0], is_open=flag == "open")
        case (("open" | "close"), 2):
            return messages.MaskEdit("cell", row=numbers[0], key=numbers[1], is_open=flag == "open")
    raise ValueError(text)
