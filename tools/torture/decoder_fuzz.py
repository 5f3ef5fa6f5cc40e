"""Coverage-guided fuzzing of the decoders with Atheris (libFuzzer), or random changes without it.

    python -m tools.torture.decoder_fuzz TARGET SEED RUNS CORPUS

A decoder may only raise what its callers expect. Inputs that reach new code are kept in a corpus
for as long as a worker lives. https://github.com/google/atheris
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flexinspect.breakpoints import grammar
from flexinspect.control import messages
from flexinspect.core.errors import FlexInspectError
from flexinspect.core.parsing import parse_json, parse_toml
from flexinspect.importers import tensor_files, torch_files
from flexinspect.masks import mask_expressions
from flexinspect.trace import arrays, codec
from tools.torture.results import Failure

N_RUNS = 5000
"""Inputs that one seed tries."""
N_RANDOM = 400
"""The same without Atheris: each of them is blind."""
LIMITS = ("-timeout=10", "-rss_limit_mb=1500", "-max_len=2048", "-max_total_time=20")
LIMIT_S = 180.0
BODIES = (
    *(messages.Restore, messages.Fork, messages.EditMask, messages.StepBody, messages.RunToBody),
    *(messages.LevelBody, messages.LayersBody, messages.BreakpointBody),
)
ROWS = [
    each
    for name, each in vars(codec).items()
    if isinstance(each, codec.RowFormat) and name not in ("_STEP_ROWS", "_LOGITS_ROWS")
]
"""The tables but for steps, whose rows `decode_step` cuts into two records."""
Target = Callable[[bytes], object]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def array(data: bytes) -> None:
    """An array: a line of JSON with item, shape, codec and stream, then its bytes."""
    head, _, rest = data.partition(b"\n")
    fields = json.loads(head)
    item, shape, how, stream = (str(fields[key]) for key in ("item", "shape", "codec", "stream"))
    chunk = arrays.ArrayChunk(0, item, item, shape, how, zlib.crc32(rest), rest)
    arrays.decode_array([chunk], "the array", stream)


def row(data: bytes) -> None:
    """A row of a table: a byte that names the table, and a list of JSON."""
    rows = ROWS[data[0] % len(ROWS)]
    n_columns = len(rows.table.names) - rows.skip
    values = [*json.loads(data[1:]), *[None] * n_columns][:n_columns]  # SQL selects all columns
    rows.decode(tuple(values))


def facts(data: bytes) -> None:
    """A fact of the manifest."""
    codec.from_json(_text(data))


def condition(data: bytes) -> None:
    """A condition of a breakpoint."""
    grammar.to_text(grammar.parse(_text(data)))


def mask(data: bytes) -> None:
    """An expression of masks."""
    mask_expressions.parse_mask(_text(data))


def toml(data: bytes) -> None:
    """A TOML text."""
    parse_toml(_text(data))


def json_text(data: bytes) -> None:
    """A JSON text."""
    parse_json(data)


def body(data: bytes) -> None:
    """The body of a command: a byte that names the command, and JSON."""
    messages.from_json(BODIES[data[0] % len(BODIES)], msgspec.json.decode(data[1:]))


def torch_file(data: bytes) -> None:
    """A file of torch.save."""
    torch_files.load_torch_file(_file(data, ".pt"))


def safetensors(data: bytes) -> None:
    """A safetensors file."""
    tensor_files.SafetensorsFile(_file(data, ".safetensors"))


def _file(data: bytes, suffix: str) -> Path:
    path = Path(sys.argv[-1]).parent / f"input{suffix}"
    path.write_bytes(data)
    return path


TARGETS: tuple[Target, ...] = (
    *(array, row, facts, condition, mask, toml, json_text, body, torch_file, safetensors),
)
EXPECTED: tuple[type[Exception], ...] = (
    *(FlexInspectError, codec.DamagedValueError, ValueError, msgspec.DecodeError),
)
"""What a caller expects; a malformed frame of `array`, `row` or `body` counts as well."""
FRAMED = (KeyError, TypeError, IndexError)
"""What only the frame raises, before the decoder is called."""


def samples(target: Target) -> list[bytes]:
    """Return valid inputs to start from."""
    cells = np.tri(6, dtype=np.bool_)
    (_, item, shape, how), chunks = arrays.encode_array(cells)
    head = json.dumps({"item": item, "shape": shape, "codec": how, "stream": "mask.cells"})
    tables = [
        bytes([n]) + json.dumps([1] * len(r.table.names)).encode() for n, r in enumerate(ROWS)
    ]
    bodies = [bytes([n]) + b'{"place": {"generation": 0, "step": 1}, "n": 1}' for n in range(8)]
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    start: dict[str, list[bytes]] = {
        "array": [head.encode() + b"\n" + b"".join(chunks)],
        "row": tables,
        "facts": [b'{"$float": "nan"}', b'["a", 1.5, null]'],
        "condition": [b"entropy > 3 and nan in layers.*", b"finding = 'mask.*' or step >= 2"],
        "mask": [b"causal & window(4)", b"~(causal | prefix(3))"],
        "toml": [b'[models]\nmine = {path = "a/b"}\n'],
        "json_text": [b'{"a": [1, 2.5, null, "\\ud800"]}'],
        "body": bodies,
        "torch_file": [_torch_sample()],
        "safetensors": [len(header).to_bytes(8, "little") + header + bytes(4)],
    }
    return start[target.__name__]


def _torch_sample() -> bytes:
    """Return the first small file of torch.save among the fixtures."""
    import zipfile

    from tools.torture.hostile_inputs import DUMPS

    for packed in sorted(DUMPS.glob("sglang*.zip")):
        with zipfile.ZipFile(packed) as archive:
            for info in sorted(archive.infolist(), key=lambda info: info.file_size):
                if info.filename.endswith(".pt"):
                    return archive.read(info)
    raise FileNotFoundError("no .pt file in the fixtures")


def check(target: Target, data: bytes) -> None:
    """Give an input to a decoder; raises only what nobody expects."""
    framed = target in (array, row, body)
    try:
        target(data)
    except EXPECTED:
        pass
    except FRAMED as error:
        if not framed or _is_in_product(error):
            raise


def _is_in_product(error: BaseException) -> bool:
    found = error.__traceback__
    while found is not None and found.tb_next is not None:
        found = found.tb_next
    return found is not None and "/flexinspect/" in found.tb_frame.f_code.co_filename


# -- the part --------------------------------------------------------------------------------------


def prepare(folder: Path) -> Path:
    """Write the first corpus of each target."""
    for target in TARGETS:
        corpus = folder / target.__name__
        corpus.mkdir()
        for number, sample in enumerate(samples(target)):
            (corpus / str(number)).write_bytes(sample)
    return folder


def has_atheris() -> bool:
    """Tell whether Atheris is installed (the extra "fuzz")."""
    return importlib.util.find_spec("atheris") is not None


def attempt(prepared: Path, seed: int, folder: Path) -> list[Failure]:
    """Fuzz one target."""
    target = TARGETS[seed % len(TARGETS)]
    corpus = prepared / target.__name__
    if not has_atheris():
        return _random_changes(target, seed, folder)
    words = ["-m", "tools.torture.decoder_fuzz", target.__name__, str(seed + 1), str(N_RUNS)]
    done = subprocess.run(
        [sys.executable, *words, str(corpus)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
    )
    if not done.returncode:
        return []
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    raised = [
        line for line in lines if "Error" in line and not line.startswith(("#", "==", "INFO"))
    ]
    detail = (raised or lines[-1:] or [f"exit status {done.returncode}"])[0].strip()[:300]
    return [Failure("decoder", detail, (target.__doc__ or "").strip())]


def _random_changes(target: Target, seed: int, folder: Path) -> list[Failure]:
    rng, starts = random.Random(seed), samples(target)
    (folder / "corpus").mkdir()
    sys.argv[1:] = [str(folder / "corpus")]
    for _ in range(N_RANDOM):
        data = bytearray(rng.choice(starts))
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.choice((0, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 3)))
        try:
            check(target, bytes(data))
        except Exception as error:
            return [Failure("decoder", f"{type(error).__name__}: {error!s:.200}", target.__name__)]
    return []


def main() -> None:
    """Fuzz a target in this process; it ends with 0 if nothing was found."""
    import atheris

    name, seed, n_runs, corpus = sys.argv[1:]
    target = next(each for each in TARGETS if each.__name__ == name)
    for module in (arrays, codec, grammar, mask_expressions, messages, tensor_files, torch_files):
        for value in [*vars(module).values()]:
            if getattr(value, "__module__", "") == module.__name__ and callable(value):
                _instrument(atheris, module, value)
    flags = [f"-seed={seed}", f"-runs={n_runs}", f"-artifact_prefix={corpus}-", *LIMITS]
    atheris.Setup([sys.argv[0], *flags, corpus], lambda data: check(target, data))
    atheris.Fuzz()


def _instrument(atheris: Any, module: Any, value: Any) -> None:
    """Let a function of a module report which of its branches are taken."""
    if hasattr(value, "__code__"):
        atheris.instrument_func(value)
        return
    for member in [*vars(value).values()] if isinstance(value, type) else ():
        if hasattr(member, "__code__"):
            atheris.instrument_func(member)


if __name__ == "__main__":
    main()
