"""Plug-ins come through entry points, built-in ones too; a broken one is reported, not hidden."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from flexinspect.core import plugins
from flexinspect.core.errors import FlexInspectError
from flexinspect.exports.exporter import load_exporter
from flexinspect.importers.importer import find_importer
from flexinspect.panels.panel_registry import load_panel
from flexinspect.rules.engine import load_rules
from flexinspect_hooks.capture import hook


def test_the_built_in_hooks_are_registered_as_plug_ins() -> None:
    assert {"attention", "logits", "memory", "modules"} <= set(plugins.names("flexinspect.hooks"))
    hooks, failed = hook.built_in_hooks()
    assert [hook.name for hook in hooks] == sorted(hook.name for hook in hooks)
    assert failed == {}


def test_a_built_in_rule_has_the_name_of_its_plug_in() -> None:
    loaded, failed = plugins.load_all(plugins.RULES)
    assert failed == {}
    names = {key: loaded[key].name for key in plugins.BUILT_IN[plugins.RULES]}
    assert names == {key: key for key in names}


def test_an_unknown_plug_in_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(FlexInspectError, match="registered: attention"):
        plugins.load("flexinspect.hooks", "absent")


def test_a_plug_in_that_does_not_import_is_reported_and_the_others_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = [
        EntryPoint("good", "math:floor", "g"),
        EntryPoint("bad", "no_such_module_here:X", "g"),
    ]
    monkeypatch.setattr(plugins, "registered", lambda group: points)
    loaded, failed = plugins.load_all("g")
    assert list(loaded) == ["good"]
    assert "no_such_module_here" in failed["bad"]


PLUG_IN = """
class Odd:
    name = title = "odd"
    def recognizes(self, folder):
        raise ValueError("this folder?")
    def open(self, folder, tick): ...
class Wrong: ...
class Shy:
    def __getattr__(self, name):
        raise ValueError("no attributes")
def leave():
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("attribute", "why"),
    [
        ("Odd", "ValueError: this folder?"),
        ("Wrong", "it needs a title and the methods"),
        ("Shy", "ValueError: no attributes"),
        ("leave", "SystemExit"),
        ("absent", "could not be loaded"),
    ],
)
def test_an_importer_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attribute: str, why: str
) -> None:
    (tmp_path / "odd_importer.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("odd", f"odd_importer:{attribute}", "g")]
    monkeypatch.setattr(plugins, "registered", lambda group: points)
    with pytest.raises(FlexInspectError, match=why):
        find_importer(tmp_path, None)


def test_a_rule_that_is_none_or_leaves_is_reported_and_the_others_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = [EntryPoint("exit", "sys:exit", "g"), EntryPoint("list", "builtins:list", "g")]
    real = [*plugins.registered(plugins.RULES)]
    monkeypatch.setattr(plugins, "registered", lambda group: [*real, *points])
    loaded = load_rules()
    assert len(loaded.rules) == len(real)
    assert loaded.failed["list"] == "It is of type list, not a Rule."
    assert "SystemExit" in loaded.failed["exit"]


def test_a_package_without_registered_hooks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "registered", lambda group: [])
    with pytest.raises(FlexInspectError, match="nothing would be recorded"):
        hook.built_in_hooks()


def test_the_page_of_the_interface_has_the_keys_and_panels_of_the_code() -> None:
    from tools.interface_page import PAGE, page

    text = PAGE.read_text("utf-8")
    assert page(text) == text, "run: python -m tools.interface_page"


HANGING = """
import threading
stopped = threading.Event()
{place}stopped.wait()
class Hang:
    def __init__(self):
        stopped.wait()
"""


@pytest.mark.parametrize("group", [plugins.PANELS, plugins.RULES, plugins.EXPORTS, plugins.HOOKS])
@pytest.mark.parametrize("place", ["", "# "])
def test_a_plug_in_that_hangs_is_an_error_after_a_time(
    group: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"hanging_{group.replace('.', '_')}_{len(place)}"
    (tmp_path / f"{module}.py").write_text(HANGING.format(place=place))
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("hanging", f"{module}:Hang", group)
    monkeypatch.setattr(plugins, "_entry_points", lambda asked: (point,) if asked == group else ())
    monkeypatch.setattr(plugins, "MAX_START_S", 0.05)
    said = "did not end within"
    if group == plugins.PANELS:
        for _ in range(2):  # it is not tried again
            with pytest.raises(FlexInspectError, match=said):
                load_panel("hanging")
    elif group == plugins.EXPORTS:
        with pytest.raises(FlexInspectError, match=said):
            load_exporter("hanging")
    elif group == plugins.RULES:
        assert said in load_rules().failed["hanging"]
    else:
        hooks, failed = hook.built_in_hooks()
        assert len(hooks) == len(plugins.BUILT_IN[plugins.HOOKS])
        assert said in failed["hanging"]
