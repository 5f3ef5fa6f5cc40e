"""`flexinspect run SCRIPT`: the program and its output are unchanged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from support.warm_python import Ran, run_warm

from flexinspect.cli.run import job_from_argv
from flexinspect.core.environment import is_recorder_alive
from flexinspect.core.errors import FlexInspectError
from flexinspect.trace.reader import TraceReader, open_trace

FLEXINSPECT = [sys.executable, "-m", "flexinspect"]
Done = subprocess.CompletedProcess[bytes]


def started(args: list[str], cwd: Path, **options: object) -> subprocess.Popen[bytes]:
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(args, cwd=cwd, **{**streams, **options})  # type: ignore[call-overload, no-any-return]


def python(*args: str, cwd: Path, stdin: bytes = b"") -> Done:
    return subprocess.run(
        (sys.executable, *args),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )


def inspected(*args: str, cwd: Path, stdin: bytes = b"", flags: tuple[str, ...] = ()) -> Done:
    command = ("-m", "flexinspect", "run", "--no-ui", "--overwrite", "--out", "t.flextrace")
    return python(*command, *flags, *args, cwd=cwd, stdin=stdin)


def inspected_warm(script: str, folder: Path) -> Ran:
    """Run a program that loads torch, in a process in which it is loaded already."""
    command = ("-m", "flexinspect", "run", "--no-ui", "--overwrite", "--out", "t.flextrace")
    return run_warm([*command, script], cwd=folder)


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), "utf-8")


def trace(folder: Path) -> TraceReader:
    return open_trace(folder / "t.flextrace")


def printed(folder: Path, stream: str) -> str:
    with trace(folder) as reader:
        return "".join(row.output.text for row in reader.output() if row.output.stream == stream)


def unseen(folder: Path) -> list[str]:
    with trace(folder) as reader:
        return [row.event.text for row in reader.events() if row.event.kind == "not-recorded"]


def same_end(mine: Done, plain: Done) -> None:
    """Compare all that a caller sees; ours comes after the program's own stderr."""
    assert mine.stdout == plain.stdout
    assert mine.stderr.startswith(plain.stderr)
    code = plain.returncode
    assert mine.returncode == (code if code >= 0 else 128 - code)


WHO = """
import __main__, os, sys
print(sys.argv, __name__, __file__, __main__ is sys.modules[__name__], sys.path[0])
print(getattr(__spec__, "name", None), __package__, __builtins__, sys.orig_argv[1:])
print(sorted(vars(__main__)))
heavy = ("torch", "transformers", "numpy", "zstandard", "traceback")
print([name for name in heavy if name in sys.modules])
os.write(1, b"bytes \\xff\\xfe that are no text\\n")
sys.stderr.write("to stderr\\n")
print("said", repr(sys.stdin.read()), end="")
"""
ENDS = {
    "nothing": "",
    "code": "sys.exit(3)",
    "text": "raise SystemExit('a reason')",
    "error": "def inner(): raise ValueError('inside')\ninner()",
    "chain": "try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError('x') from e",
    "hook": "sys.excepthook = lambda *a: print('hooked', a[0], a[2].tb_frame.f_lineno)\n1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "os.kill(os.getpid(), 9)",
    "at once": "sys.stdout.flush(); os._exit(4)",
    "syntax": "this is = no python",
    "atexit": "import atexit; atexit.register(print, 'at the end'); sys.exit('text')",
}


@pytest.mark.parametrize("end", ENDS)
def test_output_and_exit_code_are_those_of_python_itself(end: str, tmp_path: Path) -> None:
    write(tmp_path, "sub/script.py", WHO + ENDS[end] + "\n")
    args = ("sub/script.py", "a b", "--json", "--", "-x")
    plain = python(*args, cwd=tmp_path, stdin="caf\u00e9\n".encode())
    mine = inspected(*args, cwd=tmp_path, stdin="caf\u00e9\n".encode())
    same_end(mine, plain)
    with trace(tmp_path) as reader:
        state = "failed" if plain.returncode else "finished"
        assert reader.state == ("interrupted" if end == "interrupt" else state)
        if end not in ("killed", "at once"):
            assert reader.run()["exit_code"] == mine.returncode
            assert printed(tmp_path, "stdout") == plain.stdout.decode(errors="replace")
            assert printed(tmp_path, "stderr") == plain.stderr.decode(errors="replace")


def test_a_program_that_refuses_our_flags_is_told_why_it_got_them(tmp_path: Path) -> None:
    script = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    write(tmp_path, "strict.py", script)
    done = inspected("strict.py", "--level", "basic", "--fast", cwd=tmp_path)
    assert done.returncode == 2
    message = b"The program received --level, because everything after its name is passed"
    assert message in done.stderr
    own = inspected("strict.py", "--fast", cwd=tmp_path, flags=("--overwrite",))
    assert b"The program received" not in own.stderr


def test_a_module_runs_as_python_runs_it(tmp_path: Path) -> None:
    write(tmp_path, "pack/__init__.py", "")
    write(tmp_path, "pack/helper.py", "def fail(): raise RuntimeError('helped')\n")
    write(tmp_path, "pack/deep.py", WHO + "from . import helper\nhelper.fail()\n")
    args = ("-m", "pack.deep", "1", "--no-ui")
    same_end(inspected(*args, cwd=tmp_path), python(*args, cwd=tmp_path))
    missing = ("-m", "pack.absent")
    same_end(inspected(*missing, cwd=tmp_path), python(*missing, cwd=tmp_path))


def test_a_symbolic_link_and_unusual_files_run_as_they_do(tmp_path: Path) -> None:
    write(tmp_path, "real/script.py", WHO + "import beside\n")
    write(tmp_path, "real/beside.py", "print('beside')\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "script.py")
    text = "# -*- coding: latin-1 -*-\nprint('caf\u00e9', len('\u00e9'))\n"
    (tmp_path / "old.py").write_bytes(text.encode("latin-1"))
    for name in ("link.py", "old.py"):
        same_end(inspected(name, cwd=tmp_path), python(name, cwd=tmp_path))


def test_two_dashes_end_our_flags_once(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "import sys; print(sys.argv[1:])")
    assert inspected("s.py", "--", "--level", "x", cwd=tmp_path).stdout == b"['--level', 'x']\n"
    assert inspected("s.py", "--", "--", "x", cwd=tmp_path).stdout == b"['--', 'x']\n"
    write(tmp_path, "m.py", "import sys; print(sys.argv[1:])")
    assert inspected("-m", "m", "--", "--no-ui", cwd=tmp_path).stdout == b"['--no-ui']\n"


CHILDREN = """
import multiprocessing, os, sys
def work(n):
    print("child", n, __name__, flush=True)
    return n + 1
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(work, [1]), flush=True)
    sys.stdout.flush()
    if os.fork() == 0:
        print("forked", flush=True)
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_child_processes_work_and_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "script.py", CHILDREN)
    same_end(inspected("script.py", cwd=tmp_path), python("script.py", cwd=tmp_path))
    assert "forked" in printed(tmp_path, "stdout")
    with trace(tmp_path) as reader:
        assert reader.state == "finished"
    assert unseen(tmp_path)[0].startswith("3 child processes were started")


def test_threads_and_functions_at_exit_are_waited_for(tmp_path: Path) -> None:
    script = """
    import atexit, threading, time
    atexit.register(print, "last")
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
    print("main")
    """
    write(tmp_path, "script.py", script)
    assert inspected("script.py", cwd=tmp_path).stdout == b"main\nthread\nlast\n"
    assert printed(tmp_path, "stdout") == "main\nthread\nlast\n"


def test_what_is_printed_is_kept_in_the_order_it_came(tmp_path: Path) -> None:
    # Between two writes the reader must get its turn: two pipes have no common order.
    script = """
    import os, sys, time
    for n in range(5):
        print("out", n); time.sleep(0.08)
        print("err", n, file=sys.stderr); time.sleep(0.08)
        os.write(1, b"raw\\n"); time.sleep(0.08)
    """
    write(tmp_path, "script.py", script)
    inspected("script.py", cwd=tmp_path)
    with trace(tmp_path) as reader:
        rows = [row.output for row in reader.output()]
    # A line may come in several pieces: an unbuffered `print` writes each of its arguments alone.
    streams = [
        (stream, "".join(row.text for row in pieces))
        for stream, pieces in groupby(rows, key=lambda row: row.stream)
    ]
    expected = [("stdout", "out 0\n")]
    for n in range(5):
        expected += [("stderr", f"err {n}\n"), ("stdout", f"raw\nout {n + 1}\n")]
    expected[-1] = ("stdout", "raw\n")
    assert streams == expected
    assert all(a.at < b.at for a, b in pairwise(rows))


def test_very_much_output_passes_whole_and_is_kept_at_both_ends(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "for n in range(60_000): print(f'{n:099d}')")
    done = inspected("script.py", cwd=tmp_path)
    assert len(done.stdout) == 6_000_000
    kept = printed(tmp_path, "stdout")
    assert 4 << 20 <= len(kept) < 5 << 20
    assert kept.startswith("0" * 99)
    assert kept.endswith("59999\n")
    assert "characters are left out here" in kept
    left_out = int(kept.split("… ")[1].split()[0])
    mark = f"… {left_out} characters are left out here …\n"
    assert len(kept) - len(mark) + left_out == 6_000_000


SIGNALS = """
import signal, sys, time
def on(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM: sys.exit(7)
if "handle" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): signal.signal(number, on)
print("ready", flush=True)
for _ in range(600): time.sleep(0.05)
"""


def ended_by(folder: Path, command: list[str], sent: list[int]) -> tuple[bytes, int]:
    """Return what a program prints and how it ends when signals are sent to what was started."""
    with started(command, folder) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        for number in sent:
            time.sleep(0.3)
            process.send_signal(number)
        out, _ = process.communicate(timeout=PATIENCE_S)
        code = process.returncode
        return first + out, code if code >= 0 else 128 - code


@pytest.mark.parametrize(
    ("args", "sent"),
    [
        ([], [signal.SIGINT]),
        ([], [signal.SIGTERM]),
        (["handle"], [signal.SIGINT, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM]),
    ],
)
def test_signals_are_the_programs_own(args: list[str], sent: list[int], tmp_path: Path) -> None:
    write(tmp_path, "script.py", SIGNALS)
    mine = [*FLEXINSPECT, "run", "--no-ui", "--out", "t.flextrace", "script.py", *args]
    plain = [sys.executable, "script.py", *args]
    assert ended_by(tmp_path, mine, sent) == ended_by(tmp_path, plain, sent)
    with trace(tmp_path) as reader:
        assert reader.state in ("failed", "interrupted")


def test_a_program_whose_starter_is_killed_ends_its_trace(tmp_path: Path) -> None:
    write(tmp_path, "script.py", SIGNALS)
    command = [*FLEXINSPECT, "run", "--no-ui", "--out", "t.flextrace", "script.py"]
    with started(command, tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    until = time.monotonic() + PATIENCE_S
    while trace(tmp_path).state == "recording" and time.monotonic() < until:
        time.sleep(0.1)
    assert trace(tmp_path).state == "interrupted"


def test_a_program_that_ignores_ctrl_c_ends_with_its_starter_too(tmp_path: Path) -> None:
    write(tmp_path, "script.py", SIGNALS)
    command = [*FLEXINSPECT, "run", "--no-ui", "--out", "t.flextrace", "script.py"]
    # as a shell's background jobs are
    deaf = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    with started(deaf, tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with trace(tmp_path) as reader:
            run = reader.run()
        assert is_recorder_alive(run)
        process.kill()
    until = time.monotonic() + PATIENCE_S
    while is_recorder_alive(run) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_recorder_alive(run)


def _waits_for_debugger(folder: Path) -> bool:
    if not (folder / "t.flextrace").exists():
        return False
    with suppress(FlexInspectError), trace(folder) as reader:
        return any("waiting for a debugger" in row.event.text for row in reader.events())
    return False


def test_ctrl_c_while_a_debugger_is_waited_for_ends_the_run_as_interrupted(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "raise AssertionError('the program has begun')")
    flags = ("--no-ui", "--debugpy", "0", "--wait-for-client", "--out", "t.flextrace")
    with started([*FLEXINSPECT, "run", *flags, "script.py"], tmp_path) as process:
        until = time.monotonic() + PATIENCE_S
        while not _waits_for_debugger(tmp_path) and time.monotonic() < until:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=PATIENCE_S)[1].decode()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "Nothing was recorded" not in err
    with trace(tmp_path) as reader:
        assert reader.state == "interrupted"


def test_a_closed_stdout_reaches_the_program(tmp_path: Path) -> None:
    script = """
    import sys
    try:
        while True: print("x" * 1000)
    except BrokenPipeError:
        sys.stdout = None
        print("nobody reads", file=sys.stderr)
    """
    write(tmp_path, "script.py", script)
    command = [*FLEXINSPECT, "run", "--no-ui", "--out", "t.flextrace", "script.py"]
    with started(command, tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.readline() == b"nobody reads\n"


def test_json_has_stdout_for_itself(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print('mine'); raise SystemExit(3)")
    done = inspected("script.py", cwd=tmp_path, flags=("--json",))
    facts = json.loads(done.stdout)
    assert (facts["exit_code"], facts["generations"]) == (3, [])
    assert done.stderr.startswith(b"mine\n")
    assert done.returncode == 3


def test_a_program_without_torch_is_told_so(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print('nothing')")
    done = inspected("script.py", cwd=tmp_path)
    (text,) = unseen(tmp_path)
    assert text == "Nothing was recorded: the program did not import torch."
    assert text.encode() in done.stderr


@pytest.mark.parametrize("script", ["this is = no python", "import torch; raise SystemExit(3)"])
def test_a_program_that_fails_gets_no_advice_on_recording(script: str, tmp_path: Path) -> None:
    write(tmp_path, "script.py", script)
    inspected("script.py", cwd=tmp_path)
    assert unseen(tmp_path) == []


TRAINING = """
import torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def train():
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def test_a_plain_training_is_recorded_and_other_programs_are_told_how(tmp_path: Path) -> None:
    write(tmp_path, "script.py", TRAINING + "train()\n")
    done = inspected_warm("script.py", tmp_path)
    assert unseen(tmp_path) == []
    assert "training net" in done.err
    assert "3 steps, loss" in done.err
    write(tmp_path, "script.py", TRAINING)
    inspected_warm("script.py", tmp_path)
    (text,) = unseen(tmp_path)
    assert text.startswith("No step of a torch optimizer was seen. To record another training: ")
    write(tmp_path, "script.py", "import torch; torch.nn.Linear(2, 1)(torch.ones(1, 2))\n")
    inspected("script.py", cwd=tmp_path)
    (text,) = unseen(tmp_path)
    assert "the program did not use transformers' models" in text
    assert "To record text generation: with flexinspect.watch(model)." in text
    assert "To record a training: with flexinspect.watch_training(model, optimizer" in text


def test_a_program_that_records_itself_says_where_at_once(tmp_path: Path) -> None:
    watch = """
import flexinspect, sys
with flexinspect.watch_training(net, optimizer, out="own.flextrace", quiet=True):
    print("inside", file=sys.stderr)
    train()
"""
    write(tmp_path, "script.py", TRAINING + watch)
    done = inspected_warm("script.py", tmp_path)
    told = "The program records itself. To see it: flexinspect open own.flextrace"
    lines = done.err.splitlines()
    assert lines.index(f"flexinspect: {told}") < lines.index("inside")
    assert unseen(tmp_path) == []
    with trace(tmp_path) as reader:
        assert told in [row.event.text for row in reader.events() if row.event.kind == "own-trace"]
    (first,) = (line for line in lines if line.startswith("next"))
    assert first.split()[:4] == ["next", "flexinspect", "open", "own.flextrace"]


def test_the_manifest_names_the_program_and_dump_prints_its_output(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print('\\x1b[31mred')")
    inspected("script.py", "one", cwd=tmp_path)
    with trace(tmp_path) as reader:
        program = {"name": "script.py", "is_module": False, "args": ["one"]}
        assert reader.run()["program"] == program
    command = (*FLEXINSPECT, "dump", "t.flextrace")
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert 'stdout  "\\x1b[31mred' in text  # its line end may have arrived by itself
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, check=True)
    printed = "".join(row["text"] for row in json.loads(done.stdout)["output"])
    assert printed == "\x1b[31mred\n"


def test_a_program_may_set_what_numpy_reads_at_its_import(tmp_path: Path) -> None:
    script = """
    import os, sys
    assert "numpy" not in sys.modules
    os.environ["OMP_NUM_THREADS"] = "1"
    import numpy
    print(numpy.__name__)
    """
    write(tmp_path, "script.py", script)
    assert inspected("script.py", cwd=tmp_path).stdout == b"numpy\n"


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "missing": (("absent.py",), "There is no script absent.py."),
    "folder": (("here",), "here is a folder, not a script.\nFor a package: -m here."),
    "own flag": (
        ("--model", "demo", "s.py"),
        "--model applies to generations of flexinspect (--model), not to s.py",
    ),
    "own default": (
        ("--mask", "causal", "-m", "m"),
        "--mask applies to generations of flexinspect (--model), not to m",
    ),
    "layers": (("--layers", "1", "s.py"), "--layers selects whose activations"),
    "no layers": (("--level", "extreme", "--layers", "x", "s.py"), "'x' is not a number or range"),
    "in the way": (("--out", "s.py", "s.py"), "s.py exists already."),
    "no folder": (("--out", "absent/t.flextrace", "s.py"), "absent"),
    "alone": (("--declare", "d.toml"), "--declare needs a program of your own."),
    "no file": (("--declare", "d.toml", "s.py"), "The declaration d.toml cannot be read: No such"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_request_is_an_error_message_and_nothing_runs(case: str, tmp_path: Path) -> None:
    args, sentence = REFUSED[case]
    write(tmp_path, "s.py", "print('ran')")
    (tmp_path / "here").mkdir()
    command = [*FLEXINSPECT, "run", "--no-ui", *args]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert not list(tmp_path.glob("*.flextrace"))


def test_help_shows_how_a_program_is_run() -> None:
    done = subprocess.run([*FLEXINSPECT, "run", "--help"], capture_output=True, text=True)
    assert "flexinspect run script.py -- --its-own flags" in done.stdout


def test_a_file_in_the_current_folder_does_not_replace_a_module_of_ours(tmp_path: Path) -> None:
    write(tmp_path, "sqlite3.py", "raise RuntimeError('taken for the real one')")
    write(tmp_path, "sub/script.py", "import json; print(json.dumps(1))")
    command = [sys.executable, "-P", "-m", "flexinspect", "run", "--no-ui", "sub/script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_each_rank_of_torchrun_writes_its_own_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.setenv("RANK", "3")
    job = job_from_argv(["run", "--out", "a/t.flextrace", "-m", "x"])
    assert job.out == str(Path("a") / "t-rank03.flextrace")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert job_from_argv(["run", "--out", "t.flextrace", "-m", "x"]).out == "t.flextrace"
