"""Captures a script in a forked child: what `flexinspect run SCRIPT` starts, without its imports.

    python -m support.captures JOB.json

is the capture process of one script, and the end of the socket that its parent would hold.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

from flexinspect.inputs.declarations import read_declaration
from flexinspect.records import protocol
from flexinspect.records.job import Declaration, ScriptJob
from support.warm_python import Ran, run_warm


def capture(
    script: Path,
    out: Path,
    *,
    declare: str = "",
    declared: Declaration | None = None,
    args: tuple[str, ...] = (),
) -> Ran:
    """Run a script under capture in a child that is warm.

    `declare` is the text of a declaration file, `declared` a declaration that was read.
    """
    declaration = declared or Declaration()
    if declare:
        file = out.with_suffix(".toml")
        file.write_text(declare, encoding="utf-8")
        declaration = read_declaration(file)
    job = ScriptJob(
        out=str(out),
        program=str(script),
        declaration=declaration,
        args=args,
        audit_seconds=600.0,  # on a busy machine 10 s may not be enough
    )
    file = out.with_suffix(".json")
    file.write_text(job.to_json(), encoding="utf-8")
    return run_warm(["-m", "support.captures", str(file)])


def _answer(parent: socket.socket) -> None:
    """Answer the capture process: confirm that its output was forwarded."""
    with parent.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            facts = protocol.parse_message(line)
            if facts is not None and facts["kind"] == protocol.DRAIN:
                parent.sendall((protocol.format_message(protocol.DRAINED) + "\n").encode())


def _main(file: str) -> None:
    from flexinspect_hooks.user_code.script.script_run import main

    parent, child = socket.socketpair()
    parent.sendall((Path(file).read_text(encoding="utf-8") + "\n").encode())
    threading.Thread(target=_answer, args=(parent,), daemon=True).start()
    sys.exit(main(child.detach()))


if __name__ == "__main__":
    _main(sys.argv[1])
