"""Where a debugger stops for a model event, and what it shows, without one being attached."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache

from flexinspect.trace.file.side_files import (
    DebuggerStop,
    read_stop,
    remove_stop,
    stop_path,
    write_stop,
)
from flexinspect_hooks.debugger import value_descriptions
from flexinspect_hooks.debugger.frames import frame_to_stop_in, is_user_frame
from flexinspect_hooks.debugger.pdb_terminal import stop_in
from flexinspect_hooks.debugger.stops import (
    announce_stops,
    announced_stop,
    end_announcements,
    stop_reason,
)
from flexinspect_hooks.debugger.value_descriptions import (
    describe_tensor,
    render_blocks,
    render_mask,
    render_mask_mod,
)


class Layer(nn.Module):
    """A layer whose forward is of a library, unless `own` is put in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen: list[FrameType] = []
        self.inner.register_forward_hook(LIBRARY["look"](self.seen))


LIBRARY: dict[str, Any] = {"sys": sys}
exec(
    compile(
        """
def look(seen):
    def hook(module, args, output):
        seen.append(sys._getframe())
    return hook

def forward(self, x):
    return self.inner(x)
""",
        "/usr/lib/python3/site-packages/library.py",
        "exec",
    ),
    LIBRARY,
)


def where(forward: Any) -> FrameType:
    layer = Layer()
    layer.forward = forward.__get__(layer)  # type: ignore[method-assign]
    layer(torch.zeros(1, 2))
    return frame_to_stop_in(layer.seen[0])


def test_a_stop_is_in_the_users_patched_forward() -> None:
    def mine(self: Any, x: Tensor) -> Tensor:
        return helped(self, x)

    def helped(self: Any, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    found = where(mine)
    assert (found.f_code.co_name, is_user_frame(found)) == ("helped", True)


def test_without_code_of_the_users_inside_it_is_in_the_layers_forward() -> None:
    found = where(LIBRARY["forward"])
    assert found.f_code is LIBRARY["forward"].__code__
    assert not is_user_frame(found)


def test_a_stop_in_a_mask_mod_is_in_the_mask_mod() -> None:
    found: list[FrameType] = []

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found.append(frame_to_stop_in(sys._getframe()))
        return q_idx >= kv_idx

    create_block_mask(mask_mod, None, None, 4, 4, device="cpu")
    assert found[0].f_code is mask_mod.__code__


def test_between_two_forwards_it_is_where_the_users_loop_is() -> None:
    made: dict[str, Any] = {"sys": sys}
    exec(compile("def stop():\n    return sys._getframe()", "/x/site-packages/y.py", "exec"), made)
    assert frame_to_stop_in(made["stop"]()) is sys._getframe()


def test_without_a_debugger_nothing_stops() -> None:
    assert stop_in(sys._getframe(), "entropy > 3", {"step": 1}) is False


# -- what is shown -----------------------------------------------------------------------------


def test_a_tensor_is_described_by_shape_statistics_and_first_values() -> None:
    assert describe_tensor(torch.tensor([[1.0, -2.0], [0.5, 4.0]])) == (
        "2×2 float32 cpu  min -2 mean 0.875 max 4 no NaN or Inf  [1, -2, 0.5, 4]"
    )
    assert (
        describe_tensor(torch.arange(9)) == "9 int64 cpu  min 0 mean 4 max 8  [0, 1, 2, 3, 4, 5, …]"
    )
    assert describe_tensor(torch.tensor([True, False])) == (
        "2 bool cpu  1 of 2 true (50.0%)  [True, False]"
    )
    assert describe_tensor(torch.tensor(3.5)) == "0-dim float32 cpu  3.5"
    assert describe_tensor(torch.empty(0, 3)) == "0×3 float32 cpu  empty"


def test_every_nan_of_a_large_tensor_is_counted_and_a_sample_says_that_it_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(value_descriptions, "_spent", [time.perf_counter(), 0.0])
    nonfinite = torch.zeros(1_000_000)
    nonfinite[123_456], nonfinite[7] = torch.nan, torch.inf
    assert "1 NaN 1 Inf" in describe_tensor(nonfinite)
    monkeypatch.setattr(
        value_descriptions, "_spent", [time.perf_counter(), value_descriptions.BUDGET_S]
    )
    assert "(sample of 4096 of 1,000,000)" in describe_tensor(nonfinite)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_kind_of_number_and_stride_can_be_shown(dtype: torch.dtype) -> None:
    turned = torch.ones(3, 4, 5, dtype=dtype).transpose(0, 2)
    assert "5×4×3" in describe_tensor(turned)
    assert "min 1 mean 1 max 1" in describe_tensor(turned)


def test_a_tensor_without_values_is_described() -> None:
    assert describe_tensor(torch.empty(3, device="meta")) == "3 float32 meta  no values (Tensor)"
    assert "torch.sparse_coo" in describe_tensor(torch.eye(3).to_sparse())


def test_under_vmap_and_in_a_mode_the_real_values_are_shown() -> None:
    described: list[str] = []

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        described.append(describe_tensor(q_idx))
        return q_idx >= kv_idx

    create_block_mask(mask_mod, None, None, 3, 3, device="cpu")
    assert described == ["0-dim int64 cpu, one of 3 under vmap  min 0 mean 1 max 2  [0, 1, 2]"]


def test_a_mask_is_a_picture_of_its_mask_mod_and_of_its_blocks() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, device="cpu")
    assert render_blocks(mask) == ["▒··", "█▒·", "▒▒▒"]
    rows = render_mask_mod(mask)
    assert (len(rows), len(rows[0])) == (24, 48)
    assert rows[0] == "█" + "·" * 47
    assert rows[-1] == "█" * 48
    assert render_mask(torch.eye(3).bool()[None, None]) == ["█··", "·█·", "··█"]
    assert value_descriptions.describe_mask(mask).startswith(
        "300 rows × 300 keys, batch 1, heads 1; 3×3 blocks of 128×128: 1 full, 5 partial; mask_mod "
    )


def test_a_cache_a_module_and_a_container_are_one_line() -> None:
    cache = DynamicCache()
    assert value_descriptions.describe_cache(cache) == "0 layers, empty"
    cache.update(torch.zeros(1, 2, 7, 8), torch.zeros(1, 2, 7, 8), 0)
    assert value_descriptions.describe_cache(cache) == (
        "1 of 1 layers filled, 7 positions, keys 1×2×7×8 float32 cpu, 0.0 MB"
    )
    assert (
        value_descriptions.describe_module(nn.Sequential(nn.ReLU())) == "Sequential (training): 0"
    )
    container = {"x": torch.zeros(2, 3), "y": (torch.zeros(1), 5), "z": "text"}
    assert value_descriptions.describe_container(container) == (
        "dict of 3: 'x': 2×3 float32, 'y': (1 float32, 5), 'z': 'text'"
    )
    assert value_descriptions.describe_container([1, 2]) is None


# -- what viewers receive ----------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Any:
    path = tmp_path / "t.flextrace"
    announce_stops(path)
    yield path
    end_announcements()


def test_a_stop_is_announced_with_its_reason(trace: Path) -> None:
    frame = sys._getframe()
    assert read_stop(trace) is None
    with stop_reason("nan @ layers.3"), announced_stop("debugpy", frame):
        found = read_stop(trace)
    assert found is not None
    assert (found.pid, found.reason, found.file) == (os.getpid(), "nan @ layers.3", __file__)
    assert found.sentence(found.since + 40) == (
        "held by debugpy in test_a_stop_is_announced_with_its_reason "
        f"(test_debugger.py:{found.line}) for 40 s: nan @ layers.3"
    )
    assert read_stop(trace) is None


def test_stops_of_other_threads_keep_the_first_announcement(trace: Path) -> None:
    def along() -> None:
        with announced_stop("debugpy", sys._getframe()):
            pass

    with announced_stop("debugpy", sys._getframe()):
        other = threading.Thread(target=along)
        other.start()
        other.join()
        found = read_stop(trace)
        assert found is not None
        assert found.function == sys._getframe().f_code.co_name


def test_the_stop_file_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    trace = tmp_path / "t.flextrace"
    write_stop(trace, DebuggerStop(1 << 22, "debugpy", "a.py", 1, "f", time.time()))
    assert read_stop(trace) is None
    assert not stop_path(trace).exists()
    remove_stop(trace)
