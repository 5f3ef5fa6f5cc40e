"""`flexinspect doctor`, with the process that imports torch replaced by quick facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from flexinspect.cli.main import main
from flexinspect.doctor import check, hub, torch_report
from flexinspect.doctor.check import Check


@pytest.fixture
def torch_checks(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    found = [check.ok("import torch", "0.9 s", "file.py")]

    class Report:
        def __init__(self, *, test_flex_attention: bool) -> None:
            if test_flex_attention:
                found.append(check.ok("FlexAttention uncompiled", "largest error 1.0e-07"))

        def checks(self, progress: Callable[[str], None]) -> Iterator[Check]:
            progress("importing torch")
            yield from found

        def close(self) -> None:
            pass

    monkeypatch.setattr(torch_report, "TorchReport", Report)
    monkeypatch.setattr(hub, "check_hub", lambda: check.ok("hub", "https://hub.test answers"))
    return found


@pytest.mark.usefixtures("torch_checks")
def test_passed_packages_share_a_line_and_nothing_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✓ Python: ")
    assert lines[1].startswith("✓ packages: debugpy ")
    assert "torch 2." in lines[1]
    assert "✓ import torch: 0.9 s" in lines
    assert "    file.py" not in lines


@pytest.mark.usefixtures("torch_checks")
def test_verbose_prints_a_line_for_each_package_and_its_details(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--verbose", "--test-flex-attention"]) == 0
    text = capsys.readouterr().out
    assert "✓ msgspec: " in text
    assert "    file.py" in text
    assert "✓ FlexAttention uncompiled: largest error" in text


def test_only_an_error_gives_exit_code_1_and_is_named_at_the_end(
    torch_checks: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    torch_checks.append(check.warning("Triton", "too old", "pip install triton"))
    assert main(["doctor"]) == 0
    assert "    → pip install triton" in capsys.readouterr().out
    torch_checks.append(check.error("FlexAttention", "missing\x1b[2J", "Install torch."))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "✗ FlexAttention: missing\\x1b[2J" in text
    assert text.splitlines()[-1] == "1 problem to solve before a run: FlexAttention."


def test_json_has_every_check(
    torch_checks: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    torch_checks.append(check.error("FlexAttention", "missing", "Install torch."))
    assert main(["doctor", "--json", "--model", "demo", "--dataset", "demo"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    statuses = {one["name"]: one["status"] for one in found["checks"]}
    assert statuses["model"] == statuses["dataset"] == statuses["torch"] == "ok"
    assert statuses["FlexAttention"] == "error"


def test_an_unknown_dtype_is_refused_before_anything_is_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--dtype", "int3"]) == 2
    assert "int3" in capsys.readouterr().err
