"""The one table of keys: action, default keys, description, who answers.

Users remap an action by its id under `[keys]` in the settings file, for instance
`"step.next" = "n"` or `"step.next" = ["n", "right"]`. Panels never name a key; they answer actions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """One action: `id` (group.name), default keys as Textual names them, what it does.

    `label` puts it in the footer under that name. What the trace screen does not answer itself goes
    to the focused panel, or to the first one that does.
    """

    id: str
    keys: tuple[str, ...]
    text: str
    label: str = ""


KEYS: tuple[Key, ...] = (
    Key("step.next", ("right", "l"), "next token", label="next"),
    Key("step.previous", ("left", "h"), "previous token", label="back"),
    Key("step.first", ("home",), "first step, the prefill"),
    Key("step.last", ("end",), "last step"),
    Key("step.forward", ("pagedown",), "ten tokens on"),
    Key("step.back", ("pageup",), "ten tokens back"),
    Key("step.goto", ("g",), "go to a step, by number or word", label="go"),
    Key("step.follow", ("f",), "follow the newest step", label="live"),
    Key("tokens.search", ("slash",), "search the tokens", label="find"),
    Key("tokens.match", ("asterisk",), "next match of the search"),
    Key("finding.next", ("n",), "next finding", label="finding"),
    Key("finding.previous", ("N",), "previous finding"),
    Key("generation.next", ("greater_than_sign",), "next generation"),
    Key("generation.previous", ("less_than_sign",), "previous generation"),
    Key("layer.next", ("down", "j"), "next layer"),
    Key("layer.previous", ("up", "k"), "previous layer"),
    Key("head.next", ("right_square_bracket",), "next head"),
    Key("head.previous", ("left_square_bracket",), "previous head"),
    Key("panel.next", ("tab",), "next panel", label="panel"),
    Key("panel.previous", ("shift+tab",), "previous panel"),
    Key("panel.choose", ("c",), "choose what the panel shows"),
    Key("panel.maximize", ("x",), "this panel alone, or all again", label="max"),
    Key("panel.more", ("plus",), "one panel more"),
    Key("panel.fewer", ("minus",), "one panel fewer"),
    Key("zoom.in", ("z",), "zoom in"),
    Key("zoom.out", ("Z",), "zoom out"),
    Key("view.flip", ("m",), "flip the view: declared, received, executed, difference"),
    Key("view.blocks", ("B",), "show or hide the blocks"),
    Key("view.measure", ("v",), "next measure"),
    Key("cursor.left", ("shift+left", "H"), "move the cursor in the panel"),
    Key("cursor.right", ("shift+right", "L"), "move the cursor in the panel"),
    Key("cursor.up", ("shift+up", "K"), "move the cursor in the panel"),
    Key("cursor.down", ("shift+down", "J"), "move the cursor in the panel"),
    Key("cursor.enter", ("enter",), "go to what the cursor is on"),
    Key("run.pause", ("space",), "pause the model after this step, or let it go on"),
    Key("run.step", ("full_stop",), "let the model make one token"),
    Key("run.breakpoints", ("b",), "breakpoints: stop when a condition holds"),
    Key("travel.restore", ("R",), "put the model back to this step"),
    Key("travel.fork", ("F",), "go on from this step with another token, as a branch"),
    Key("travel.mask", ("E",), "go on from this step with another mask, as a branch"),
    Key("branch.choose", ("t",), "choose a branch"),
    Key("run.stop", ("ctrl+c",), "stop the run; its trace stays valid (twice: end it at once)"),
    Key("screen.shot", ("s",), "save a picture of the screen"),
    Key("panel.export", ("S",), "save a picture of the panel"),
    Key("app.palette", ("p", "ctrl+p"), "all commands", label="menu"),
    Key("app.help", ("question_mark",), "help", label="help"),
    Key("app.theme", ("T",), "choose a theme"),
    Key("app.quit", ("q",), "quit", label="quit"),
)

N_DIGITS = 10


def all_keys() -> tuple[Key, ...]:
    """Return the table with the digits, which show a panel by its number; 0 stands for 10."""
    digits = tuple(
        Key(f"panel.show-{n}", (str(n % 10),), f"show panel {n} here")
        for n in range(1, N_DIGITS + 1)
    )
    return KEYS + digits
