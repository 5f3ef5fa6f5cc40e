"""`flexinspect.watch` where several loops, threads or parts share one model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import VOCAB, ids, make_model
from torch import Tensor
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

import flexinspect
from flexinspect.trace.reader import TraceReader


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "own.flextrace"


def prompt_of(n: int, seed: int = 3) -> Tensor:
    return torch.tensor([ids(n, seed)])


def texts(reader: TraceReader, kind: str) -> list[str]:
    return [row.event.text for row in reader.events() if row.event.kind == kind]


def tokens_of(reader: TraceReader, generation: int) -> list[int]:
    return [token.token_id for token in reader.tokens(generation)]


def test_two_interleaved_prompts_of_one_length_are_distinguished(out: Path) -> None:
    model = make_model("llama")
    inputs = [prompt_of(6, 1), prompt_of(6, 2)]
    caches = [DynamicCache(config=model.config) for _ in inputs]
    with flexinspect.watch(model, out=out) as trace:
        for _ in range(2):
            for n, cache in enumerate(caches):
                inputs[n] = model(inputs[n], past_key_values=cache).logits[:, -1:].argmax(-1)
    with trace.reader() as reader:
        assert [tokens_of(reader, n) for n in (0, 1)] == [list(ids(6, 1)), list(ids(6, 2))]
        assert all(token.step is None for n in range(4) for token in reader.tokens(n))
        event_text = texts(reader, "cache-switched")
        assert ["to generation 0" in event_text[0], "to generation 1" in event_text[1]] == [
            True,
            True,
        ]


def overlapping(model: Any, forwards: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run these forwards in their own threads, so that all are inside layer 1 at the same time."""
    meet = threading.Barrier(len(forwards))
    found: dict[str, Tensor] = {}

    def work(name: str) -> None:
        found[name] = model(forwards[name]).logits

    def wait(*_: Any) -> None:
        meet.wait(20)

    handle = model.model.layers[1].register_forward_pre_hook(wait)
    threads = [threading.Thread(target=work, args=(name,)) for name in forwards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    return found


def test_one_of_simultaneous_forwards_is_recorded_with_an_event(out: Path) -> None:
    model = make_model("llama")
    inputs = {"a": prompt_of(5), "b": prompt_of(8)}
    alone = {name: model(row).logits for name, row in inputs.items()}
    with flexinspect.watch(model, out=out) as trace:
        found = overlapping(model, inputs)
        model(prompt_of(4))
    assert all(torch.equal(found[name], alone[name]) for name in inputs)
    with trace.reader() as reader:
        assert [row.generation for row in reader.generations()] == [0, 1]
        (step,) = reader.steps(0)
        assert [call.q_len for call in reader.calls(0, 0)] == [step.q_len] * 3
        assert len(tokens_of(reader, 0)) == step.q_len
        (event_text,) = texts(reader, "not-recorded")
        assert "One thread is recorded at a time" in event_text
        assert "observer.incomplete" in {finding.id for finding in reader.findings()}
        assert tokens_of(reader, 1) == list(ids(4, 3))


def test_removed_hooks_are_reported(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("llama")
    with flexinspect.watch(model, out=out) as trace:
        model(prompt_of(4))
        for module in model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        model(prompt_of(5))
    with trace.reader() as reader:
        assert len(reader.generations()) == 1
        (event_text,) = texts(reader, "not-recorded")
    assert event_text in capsys.readouterr().err
    assert "removed hooks of flexinspect from the model" in event_text


def test_tokens_of_an_encoder_decoder_model_are_the_decoders(out: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    model = T5ForConditionalGeneration(config).eval()
    with flexinspect.watch(model, out=out) as trace:
        answer = model.generate(prompt_of(5), max_new_tokens=4, do_sample=False)
    with trace.reader() as reader:
        assert len(reader.generations()) == 1
        assert tokens_of(reader, 0) == answer[0].tolist()
        assert [step.chosen_id for step in reader.steps(0)] == answer[0, 1:].tolist()
        assert not texts(reader, "not-recorded")


def test_a_custom_loop_of_generate_is_recorded_as_user_code(out: Path) -> None:
    model = make_model("llama")

    def loop(model: Any, input_ids: Tensor, **_: Any) -> Tensor:
        for _ in range(3):
            best = model(input_ids, use_cache=False).logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, best), 1)
        return input_ids

    with flexinspect.watch(model, out=out) as trace:
        answer = model.generate(prompt_of(5), custom_generate=loop, max_new_tokens=3)
    with trace.reader() as reader:
        assert tokens_of(reader, 0) == answer[0, :-1].tolist()
        assert reader.n_steps(0) == 3
        assert not texts(reader, "generate-not-followed")
