"""Tensors of `.pt` files are read without torch, and a hostile file runs no code."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.dumps import CHOSEN, PROMPT, unpack_dump

from flexinspect.core.errors import UsageError
from flexinspect.importers.torch_files import LazyTensor, UnreadableTensor, load_torch_file


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def archive(file: Path, structure: bytes, compress: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(file, "w", compress) as out:
        out.writestr("x/data.pkl", structure)
        out.writestr("x/data/0", np.arange(4, dtype=np.float32).tobytes())
    return file


def test_the_tensors_of_a_real_dump_are_those_that_ran(tmp_path: Path) -> None:
    folder = unpack_dump("sglang-passes", tmp_path) / "TP0_PP0_Rank0_pid4321"
    first = load_torch_file(folder / "Pass00000.pt")
    ids = first["model.forward_batch_info.input_ids"].read()
    assert (ids.array.tolist(), ids.dtype) == (PROMPT, "int64")
    q, k = first["model.layers.0.self_attn.rotary_emb"]
    assert (q.shape, k.shape) == ((5, 16), (5, 8))
    later = [load_torch_file(folder / f"Pass0000{n}.pt") for n in (1, 2, 3)]
    read = [one["model.forward_batch_info.input_ids"].read().array.item() for one in later]
    assert read == CHOSEN


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(lambda mark: Call(os.system, f"touch {mark}"), id="a command"),
        pytest.param(lambda mark: Call(eval, f"open({str(mark)!r}, 'w')"), id="an expression"),
        pytest.param(lambda mark: Call(Path.touch, mark), id="a method"),
        pytest.param(lambda mark: Call(exec, f"open({str(mark)!r}, 'w')"), id="a program"),
    ],
)
def test_a_hostile_pickle_runs_no_code(tmp_path: Path, hostile: Callable[[Path], Call]) -> None:
    mark = tmp_path / "mark"
    structure = pickle.dumps({"value": hostile(mark)}, protocol=2)
    pickle.loads(structure)  # it does what it says
    mark.unlink(missing_ok=True)
    with pytest.raises(UsageError, match="neither a tensor nor plain data; nothing of it was run"):
        load_torch_file(archive(tmp_path / "a.pt", structure))
    assert not mark.exists()


def test_a_name_with_dots_reaches_no_other_module(tmp_path: Path) -> None:
    structure = b"\x80\x04\x8c\x0bcollections\x8c\x16OrderedDict.fromkeys.x\x93."
    with pytest.raises(UsageError, match="neither a tensor"):
        load_torch_file(archive(tmp_path / "a.pt", structure))


def test_a_file_cannot_change_the_functions_that_it_may_call(tmp_path: Path) -> None:
    from flexinspect.importers import torch_files

    out = io.BytesIO()
    out.write(b"\x80\x02ctorch._utils\n_rebuild_parameter\n}X\x08\x00\x00\x00__dict__}sb.")
    load_torch_file(archive(tmp_path / "a.pt", out.getvalue()))
    assert not vars(torch_files._first_argument)


def test_a_memo_index_of_four_billion_takes_no_memory(tmp_path: Path) -> None:
    structure = b"\x80\x02}r\xf0\xff\xff\xff."
    assert load_torch_file(archive(tmp_path / "a.pt", structure)) == {}


def tensor_file(file: Path, offset: int, shape: Any, stride: Any) -> Path:
    """Write a file with a tensor of a storage of 4 float32."""

    class Storage:
        pass

    class Pickler(pickle._Pickler):
        def persistent_id(self, thing: Any) -> Any:
            kind = Name("torch", "FloatStorage")
            return ("storage", kind, "0", "cpu", 4) if isinstance(thing, Storage) else None

        def save(self, thing: Any, save_persistent_id: bool = True) -> None:
            if isinstance(thing, Name):
                self.write(f"c{thing.module}\n{thing.name}\n".encode())
            else:
                super().save(thing, save_persistent_id)

    class Name:
        def __init__(self, module: str, name: str) -> None:
            self.module, self.name = module, name

    out = io.BytesIO()
    out.write(b"\x80\x02")
    pickler = Pickler(out, 2)
    pickler.save(Name("torch._utils", "_rebuild_tensor_v2"))
    pickler.save((Storage(), offset, shape, stride, False, {}))
    out.write(b"R.")
    return archive(file, out.getvalue())


def test_strides_and_offsets_are_followed(tmp_path: Path) -> None:
    tensor = load_torch_file(tensor_file(tmp_path / "a.pt", 0, (2, 2), (1, 2)))
    assert isinstance(tensor, LazyTensor)
    assert tensor.read().array.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    expanded = load_torch_file(tensor_file(tmp_path / "b.pt", 1, (3,), (0,)))
    assert expanded.read().array.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [(0, (5,), (1,)), (4, (1,), (1,)), (0, (2, 2), (4, 1)), (0, (1 << 40,), (0,))],
)
def test_a_tensor_larger_than_its_storage_is_refused(
    tmp_path: Path, offset: int, shape: Any, stride: Any
) -> None:
    tensor = load_torch_file(tensor_file(tmp_path / "a.pt", offset, shape, stride))
    with pytest.raises(UsageError, match=r"needs more bytes than the file has|at most 8 GiB"):
        tensor.read()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a .pt file"),
        (b"PK\x03\x04 and no more", "not a .pt file"),
        (pickle.dumps([1]), "not a .pt file"),
    ],
)
def test_another_file_is_refused_in_one_sentence(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_torch_file(file)


def test_a_damaged_structure_and_a_compressed_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its structure cannot be read"):
        load_torch_file(archive(tmp_path / "a.pt", b"\x80\x02}q"))
    with pytest.raises(UsageError, match="missing or compressed"):
        load_torch_file(archive(tmp_path / "b.pt", b"\x80\x02}.", zipfile.ZIP_DEFLATED))


@pytest.mark.slow
def test_every_type_that_torch_saves_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    import torch

    types = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8)
    types = (*types, torch.uint8, torch.bool, torch.uint16)
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in types}
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).T
    tensors["part"] = torch.arange(6.0)[2:4]
    tensors["parameter"] = torch.nn.Parameter(torch.ones(2))
    state = torch.nn.Linear(2, 2).state_dict()
    torch.save({**tensors, "float8": torch.ones(2).to(torch.float8_e4m3fn), "state": state},
               tmp_path / "a.pt")  # fmt: skip
    found = load_torch_file(tmp_path / "a.pt")
    for name, tensor in tensors.items():
        read = found[name].read()
        assert read.dtype == str(tensor.dtype).removeprefix("torch.")
        assert read.array.tolist() == tensor.tolist()
    assert isinstance(found["float8"], UnreadableTensor)
    assert found["state"]["weight"].read().array.tolist() == state["weight"].tolist()


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    import subprocess

    folder = unpack_dump("sglang-passes", tmp_path)
    code = (
        "import sys; from pathlib import Path; "
        "from flexinspect.importers.torch_files import load_torch_file; "
        "load_torch_file(next(Path(sys.argv[1]).rglob('*.pt'))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
