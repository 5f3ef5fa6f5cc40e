"""Models of an unchanged program: detected, distinguished, and the same in every bit."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.paths import DEMO, TESTS
from support.patience import PATIENCE_S
from support.warm_python import Popen
from transformers import AutoTokenizer

from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.loading.tokenizers import Vocabulary
from flexinspect_hooks.user_code.model_discovery import BASE_MODEL

HEAD = f"""
import gc, json, sys, time, warnings
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.tiny import ids, make_model
torch.set_num_threads(2)
def tell(**facts): print(json.dumps(facts), flush=True)
def prompt(n=7): return torch.tensor([ids(n, 3)])
def greedy(model, input_ids=None, n=4, **options):
    input_ids = prompt() if input_ids is None else input_ids
    return model.generate(input_ids, max_new_tokens=n, do_sample=False, **options)
"""


@dataclass(frozen=True)
class Ran:
    """Results of a program with capture (`mine`) and without it (`plain`)."""

    mine: subprocess.CompletedProcess[str]
    plain: subprocess.CompletedProcess[str]
    path: Path

    def trace(self) -> TraceReader:
        return open_trace(self.path)

    def events(self, kind: str) -> list[Any]:
        with self.trace() as reader:
            return [row.event for row in reader.events() if row.event.kind == kind]


def ran(folder: Path, script: str, *flags: str, fresh: bool = False) -> Ran:
    """Run a program with capture, in a fresh interpreter or a forked process, and without."""
    begin = subprocess.Popen if fresh else Popen
    (folder / "script.py").write_text(HEAD + textwrap.dedent(script), "utf-8")
    command = [sys.executable, "-m", "flexinspect", "run", "--no-ui", "--out", "t.flextrace"]
    plain = begun(folder / "plain", sys.executable, str(folder / "script.py"))
    mine = begun(folder, *command, *flags, str(folder / "script.py"), begin=begin)
    return Ran(done(mine), done(plain), folder / "t.flextrace")


def begun(
    folder: Path, *arguments: str, begin: Callable[..., subprocess.Popen[str]] = Popen
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    pipe = subprocess.PIPE
    return begin(arguments, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def done(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


SEVERAL = """
first, second = make_model("llama"), make_model("qwen2", num_hidden_layers=2)
state = lambda m: (sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
before = [state(first), state(second)]
for model in (first, second, first):
    out = greedy(model, output_logits=True, return_dict_in_generate=True)
    tell(tokens=out.sequences[0].tolist(), sums=[float(row.double().sum()) for row in out.logits])
    time.sleep(0.2)  # what is printed is placed by the time at which it is read
torch.manual_seed(3)
tell(sampled=second.generate(prompt(), max_new_tokens=3, do_sample=True)[0].tolist())
input_ids = prompt()
for _ in range(3):  # a loop of one's own, without a cache, on the base model and a head
    hidden = first.model(input_ids, use_cache=False).last_hidden_state[:, -1]
    input_ids = torch.cat((input_ids, first.lm_head(hidden).argmax(-1, keepdim=True)), 1)
tell(own=input_ids[0].tolist())
warnings.warn("still heard")
try:
    first(torch.tensor([[10_000]]))
except IndexError as error:
    import traceback
    frames = traceback.extract_tb(error.__traceback__)
    tell(error=str(error), files=[f.filename for f in frames if "flexinspect_hooks" in f.filename])
import copy, io, pickle
saved = io.BytesIO()
torch.save(second, saved)
saved.seek(0)
again = torch.load(saved, weights_only=False)
# A pickle has the addresses of storages in decimal digits, so the last digits of its length vary.
tell(kilobytes=round(len(pickle.dumps(first)) / 10_000) * 10, hooks=len(again._forward_hooks))
tell(copied=greedy(copy.deepcopy(first))[0].tolist(), loaded=greedy(again)[0].tolist())
whole = torch.compile(make_model("llama"), backend="eager")
best = lambda model, input_ids: model(input_ids).logits.argmax(-1)
part = torch.compile(best, backend="eager", fullgraph=True)
tell(whole=whole(prompt()).logits[0, -1].argmax().item(), part=part(second, prompt())[0].tolist())
import os, weakref
from transformers import PreTrainedModel
if (child := os.fork()) == 0:
    tell(left=[len(first._forward_hooks), "__call__" in vars(PreTrainedModel)])
    os._exit(0)
os.waitpid(child, 0)
def use():
    model = make_model("phi3")
    greedy(model)
    return weakref.ref(model)
gc.disable()
gone = use()
tell(gone=gone() is None)
for module in first.modules():  # as people do who wonder about odd outputs
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
tell(cleared=greedy(first, n=2)[0].tolist())
import threading
def work():
    tell(threads=torch.get_num_threads())
    tell(last=greedy(second, n=2)[0].tolist())
threading.Thread(target=work).start()
sys.exit(9)  # the thread goes on
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return ran(tmp_path_factory.mktemp("several"), SEVERAL, fresh=True)


def test_output_is_the_same_in_every_bit_and_warnings_are_reported(several: Ran) -> None:
    assert several.plain.returncode == 9, several.plain.stderr
    assert several.mine.stdout == several.plain.stdout
    assert several.mine.returncode == 9
    assert several.mine.stderr.startswith(several.plain.stderr)
    ours = several.mine.stderr.removeprefix(several.plain.stderr)
    assert "Warning" not in ours
    assert "UserWarning: still heard" in several.mine.stderr


def test_our_frames_are_not_in_user_tracebacks(several: Ran) -> None:
    assert '"files": []' in several.mine.stdout


def test_models_are_distinguished(several: Ran) -> None:
    with several.trace() as reader:
        run = reader.run()
        names = ["LlamaForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM (2)"]
        assert [facts["name"] for facts in run["models"]][:3] == names
        assert run["model"] == run["models"][0]
        assert [facts["layers"] for facts in run["models"]][:2] == [3, 2]
        rows = reader.generations()
        assert [row.generation for row in rows] == list(range(len(rows)))
        assert [row.model for row in rows][:5] == [*names[:2], *names[:2], names[0]]
        assert reader.model(1)["class"] == "Qwen2ForCausalLM"
        assert [len(reader.calls(n, 0)) for n in range(3)] == [3, 2, 3]


def test_every_token_and_step_is_recorded(several: Ran) -> None:
    results = [json.loads(line) for line in several.plain.stdout.splitlines()]
    with several.trace() as reader:
        for number in range(3):
            tokens = [token.token_id for token in reader.tokens(number)]
            assert tokens == results[number]["tokens"]
            assert [step.phase for step in reader.steps(number)] == ["prefill"] + ["decode"] * 3
        assert [token.token_id for token in reader.tokens(3)] == results[3]["sampled"]
        assert [token.token_id for token in reader.tokens(4)] == results[4]["own"][:-1]
        assert reader.n_steps(4) == 3
        last = reader.generations()[-1]  # of a thread that outlived the main one
        assert [t.token_id for t in reader.tokens(last.generation)] == results[-1]["last"]
        assert {row.state for row in reader.generations()} <= {"finished", "failed"}
        assert (reader.state, reader.run()["exit_code"]) == ("failed", 9)
        counted = sum(reader.n_steps(row.generation) for row in reader.generations())
        assert reader.run()["cost"]["steps"] == counted


def test_a_base_model_that_is_called_itself_belongs_to_the_model_with_the_head(
    several: Ran,
) -> None:
    with several.trace() as reader:
        events = [row.event for row in reader.events() if row.event.text == BASE_MODEL]
        assert [(event.generation, event.step) for event in events] == [(4, 0)]
        assert reader.generations()[4].model == "LlamaForCausalLM"


def test_hooks_that_the_program_removed_are_installed_again_with_an_event(several: Ran) -> None:
    (line,) = [line for line in several.plain.stdout.splitlines() if '"cleared"' in line]
    with several.trace() as reader:
        (row,) = reader.generations()[-2:-1]
        assert row.model == "LlamaForCausalLM"
        tokens = [token.token_id for token in reader.tokens(row.generation)]
        assert tokens == json.loads(line)["cleared"]
        assert len(reader.calls(row.generation, 1)) == 3
        assert len(reader.layer_stats(row.generation, 1)) > 0
    (event,) = several.events("hooks-reinstalled")
    assert "removed hooks of flexinspect from the model" in event.text


def test_the_session_of_a_deleted_model_ends(several: Ran) -> None:
    assert '"gone": true' in several.plain.stdout
    assert '"gone": true' in several.mine.stdout
    assert not several.events("hook-disabled")


def test_an_exception_that_was_caught_does_not_end_the_trace(several: Ran) -> None:
    assert not several.events("error")


def test_a_model_compiled_as_a_whole_has_steps_without_layers(several: Ran) -> None:
    (event,) = [e for e in several.events("not-recorded") if "child" not in e.text]
    assert event.text.startswith("Attention was seen in 0 of 3 layers")
    with several.trace() as reader:
        assert reader.n_steps(event.generation) == 1
        assert not reader.calls(event.generation, 0)
        assert reader.logits(event.generation, 0) is not None


def test_no_hooks_are_left_in_a_forked_child(several: Ran) -> None:
    assert '"left": [0, false]' in several.mine.stdout
    texts = [event.text for event in several.events("not-recorded")]
    assert "1 child process was started; what runs there is not recorded." in texts


def test_output_is_assigned_to_its_step(several: Ran) -> None:
    with several.trace() as reader:
        rows = [row.output for row in reader.output() if '"tokens"' in row.output.text]
    assert [(row.generation, row.step) for row in rows] == [(0, 3), (1, 3), (2, 3)]


TOKENIZER_FIRST = """
from transformers import PreTrainedTokenizerFast
import sys, torch, flexinspect
assert "torch.nn.attention.flex_attention" not in sys.modules
flexinspect.watch_training
from torch.nn.attention.flex_attention import flex_attention
q = torch.zeros(1, 2, 4, 8)
flex_attention(q, q, q)
"""
MODEL_LAST = """
model = make_model("llama")
tell(found=greedy(model)[0].tolist())
"""


def test_modules_may_be_imported_in_any_order_also_by_flexinspect(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TOKENIZER_FIRST + HEAD + MODEL_LAST, "utf-8")
    arguments = [sys.executable, "-m", "flexinspect", "run", "--no-ui", "--out", "t.flextrace"]
    mine = done(begun(tmp_path, *arguments, "script.py", begin=subprocess.Popen))
    assert mine.returncode == 0, mine.stderr
    with open_trace(tmp_path / "t.flextrace") as reader:
        assert sorted(reader.n_steps(row.generation) for row in reader.generations()) == [1, 4]
        assert "not-recorded" not in {row.event.kind for row in reader.events()}


def test_a_program_that_only_tokenizes_does_not_import_torch(tmp_path: Path) -> None:
    script = f"""
    import sys
    from transformers import PreTrainedTokenizerFast
    tokenizer = PreTrainedTokenizerFast.from_pretrained({str(DEMO)!r})
    print(tokenizer("one two").input_ids, "torch" in sys.modules)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script), "utf-8")
    arguments = [sys.executable, "-m", "flexinspect", "run", "--no-ui", "--out", "t.flextrace"]
    plain = done(begun(tmp_path, sys.executable, "script.py", begin=subprocess.Popen))
    assert (
        done(begun(tmp_path, *arguments, "script.py", begin=subprocess.Popen)).stdout
        == plain.stdout
    )


FAILS = """
from transformers import AutoTokenizer
model = make_model("llama", vocab_size=2560)
tokenizer = AutoTokenizer.from_pretrained({demo!r})
tokens = tokenizer(["What is the capital of France? And of Peru?"], return_tensors="pt").input_ids
import flexinspect
with flexinspect.watch(model, out="inner.flextrace"):
    greedy(model, tokens, n=2)
calls = 0
def hook(module, args):
    global calls
    calls += 1
    if calls == 3: raise RuntimeError("the user's own")
model.model.layers[1].register_forward_pre_hook(hook)
greedy(model, tokens, n=8)
"""

DECLARED = """
mask = "segment-isolation"
[[segments]]
text = "What is the capital of France?"
[[segments]]
text = " And of Peru?"
label = "second"
kind = "cue"
"""


@pytest.fixture(scope="module")
def fails(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("fails")
    (folder / "declared.toml").write_text(DECLARED, "utf-8")
    flags = ("--declare", "declared.toml", "--level", "extreme", "--layers", "1,9")
    return ran(folder, FAILS.format(demo=str(DEMO)), *flags)


def test_candidates_have_the_text_of_a_tokenizer_that_the_program_loads_after_its_model(
    fails: Ran,
) -> None:
    with fails.trace() as reader:
        vocabulary = Vocabulary(AutoTokenizer.from_pretrained(DEMO))
        best = [reader.logits(0, step).candidates[0] for step in range(reader.n_steps(0))]
        assert [one.text for one in best] == [vocabulary.text_of(one.token_id) for one in best]
        lens = [one for step in range(2) for one in reader.lens(1, step)]
        assert lens
        for one in lens:
            assert one.texts == tuple(map(vocabulary.text_of, one.token_ids))


def test_an_exception_is_unchanged_and_marks_its_step(fails: Ran) -> None:
    assert fails.mine.returncode == fails.plain.returncode == 1
    last = "RuntimeError: the user's own\n"
    assert last in fails.mine.stderr
    theirs = fails.mine.stderr.split(last)[0]
    assert "flexinspect_hooks" not in theirs
    assert theirs.count("Traceback") == 1
    with fails.trace() as reader:
        assert reader.state == "failed"
        generation = reader.generations()[-1]
        assert (generation.generation, generation.state) == (1, "failed")
        assert reader.n_steps(1) == 2
    (error,) = fails.events("error")
    assert (error.generation, error.step) == (1, 2)
    assert error.text == "RuntimeError: the user's own"
    assert "flexinspect_hooks" not in error.data["traceback"]


def test_a_declared_text_is_found_with_the_programs_tokenizer(fails: Ran) -> None:
    with fails.trace() as reader:
        generation = reader.generation(0)
        assert generation.mask == "segment-isolation"
        assert generation.declared["preset"] == "segment-isolation"
        labels = [(segment.label, str(segment.kind)) for segment in reader.segments(0)]
        assert ("What is the capital of …", "paraphrase") in [(t[:23] + "…", k) for t, k in labels]
        assert ("cue second", "cue") in labels
        text = "".join(token.text for token in reader.tokens(0) if token.step is None)
        assert "capital of France" in text
        assert {info.layer for info in reader.arrays(0, 0) if info.stream == "q"} == {1}


def test_watch_within_a_program_records_into_its_own_trace_too(fails: Ran) -> None:
    with open_trace(fails.path.with_name("inner.flextrace")) as inner, fails.trace() as outer:
        assert inner.state == "finished"
        assert len(inner.generations()) == 1
        for reader in (inner, outer):
            assert reader.n_steps(0) == 2
            assert [len(reader.calls(0, step)) for step in range(2)] == [3, 3]
        ids = [[token.token_id for token in reader.tokens(0)] for reader in (inner, outer)]
        assert ids[0] == ids[1]


IN_THE_MIDDLE = """
import sys
class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.configuration_utils":  # which cache_utils imports first
            import torch.nn.attention.flex_attention
sys.meta_path.insert(0, Early())
import transformers.cache_utils
"""


def test_flex_attention_that_is_imported_in_the_middle_of_transformers_is_recorded(
    tmp_path: Path,
) -> None:
    """As by HQQ, which transformers imports, where it is installed, from its module of caches."""
    (tmp_path / "script.py").write_text(IN_THE_MIDDLE, "utf-8")
    command = [sys.executable, "-m", "flexinspect", "run", "--no-ui", "--out", "t.flextrace"]
    assert done(begun(tmp_path, *command, "script.py", begin=subprocess.Popen)).returncode == 0
    with open_trace(tmp_path / "t.flextrace") as reader:
        texts = [row.event.text for row in reader.events() if row.event.kind == "not-recorded"]
    assert not [text for text in texts if "flex_attention" in text and "Error" in text]
