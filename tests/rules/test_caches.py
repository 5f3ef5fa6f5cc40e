"""Faults of the cache are found in runs of real models, and correct caches are not reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, one, planted, serious
from support.tiny import FAMILIES, ids, make_model
from support.warm_python import run_warm
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, DynamicCache, StaticCache

from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.reader import open_trace

NEW = 6


def prompt(n: int = 9, seed: int = 3) -> Tensor:
    return torch.tensor([ids(n, seed)])


def greedy(model: Any, input_ids: Tensor, **options: Any) -> Tensor:
    options = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": NEW, **options}
    found: Tensor = model.generate(input_ids, **{"do_sample": False, **options})
    return found


def decode(
    model: Any,
    input_ids: Tensor,
    n: int = NEW,
    cache: Any = None,
    chosen: Any = None,
    **options: Any,
) -> None:
    """Run a user's loop, with the cache that it holds."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    for _ in range(n):
        input_ids = (
            model(input_ids, past_key_values=cache, use_cache=True, **options)
            .logits[:, -1:]
            .argmax(-1)
        )


def about_caches(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.id.startswith("cache.")]


def patch_attention(model: Any, layer: int, change: Callable[..., dict[str, Any]]) -> None:
    """Change what one layer's attention is called with, as a patched forward does."""
    inner = model.model.layers[layer].self_attn
    original = inner.forward

    def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
        return original(hidden_states, **change(hidden_states.shape[1], **kwargs))

    inner.forward = forward


def without(n_rows: int, **kwargs: Any) -> dict[str, Any]:
    return {**kwargs, "past_key_values": None}


# -- layers whose cache is empty, or no longer filled ----------------------------------------------


@pytest.mark.parametrize(
    ("family", "layer", "level"), [("llama", 0, "basic"), ("qwen3", 1, "advanced")]
)
def test_a_layer_that_leaves_its_cache_empty_is_named(
    tmp_path: Path, family: str, layer: int, level: str
) -> None:
    model = make_model(family)
    patch_attention(model, layer, without)
    found = planted(tmp_path, model, lambda: greedy(model, prompt()), level=level)
    finding = one(found, "cache.empty-layer")
    others = "layers 1-2 hold 9" if layer == 0 else "layers 0, 2 hold 9"
    assert (finding.severity, finding.layer, finding.step) == (Severity.ERROR, layer, 0)
    assert finding.sentence == (f"Layer {layer} received a cache and left it empty (0), {others}.")
    assert len(about_caches(found)) == 1
    assert of(found, "positions.restart") == []


def test_layers_beyond_the_end_of_a_cache_made_bit_by_bit_are_named_when_they_see_little(
    tmp_path: Path,
) -> None:
    model = make_model("llama")
    patch_attention(model, 2, without)
    found = planted(tmp_path, model, lambda: decode(model, prompt(), cache=DynamicCache()))
    finding = one(found, "cache.empty-layer")
    assert (finding.layer, finding.step) == (2, 1)
    assert finding.sentence.endswith("in step 1 it attends to 1 key instead of 10.")


def test_no_layer_that_keeps_anything_is_one_finding(tmp_path: Path) -> None:
    model = make_model("llama")
    for layer in range(3):
        patch_attention(model, layer, without)
    found = planted(tmp_path, model, lambda: decode(model, prompt(), 4))
    (finding,) = of(found, "cache.empty-layer")
    assert finding.sentence == (
        "All 3 layers received a cache and left it empty (0), no layer holds any keys."
    )
    assert finding.layers == (0, 1, 2)


def test_a_layer_that_takes_another_way_for_single_rows_loses_its_keys(tmp_path: Path) -> None:
    """The prompt is cached; for q length 1 the patched forward drops the cache."""
    model = make_model("mistral", sliding_window=None)

    def only_prompts(n_rows: int, **kwargs: Any) -> dict[str, Any]:
        return without(n_rows, **kwargs) if n_rows == 1 else kwargs

    patch_attention(model, 1, only_prompts)
    found = planted(tmp_path, model, lambda: greedy(model, prompt()))
    finding = one(found, "cache.lost")
    assert (finding.severity, finding.layer, finding.step) == (Severity.ERROR, 1, 1)
    assert finding.sentence == (
        "Layer 1 attends to only 1 key in step 1, those of the step itself; the cache held 9 "
        "before it."
    )


def test_a_layer_whose_cache_shrinks_between_steps_is_named(tmp_path: Path) -> None:
    model, cache = make_model("llama"), None

    def run() -> None:
        cache = DynamicCache(config=model.config)
        input_ids = prompt()
        for step in range(5):
            input_ids = model(input_ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            if step == 2:
                layer = cache.layers[1]
                layer.keys, layer.values = layer.keys[:, :, :4], layer.values[:, :, :4]

    assert cache is None
    finding = one(planted(tmp_path, model, run), "cache.lost")
    assert (finding.layer, finding.step) == (1, 3)
    assert "lost keys between steps 2 and 3: the cache held 11 and now holds 4" in finding.sentence


def test_single_tokens_without_a_cache_are_a_lost_cache(tmp_path: Path) -> None:
    """The loop feeds the newest token alone and does not pass the cache on."""
    model = make_model("llama")

    def run() -> None:
        input_ids = prompt()
        for _ in range(5):
            input_ids = model(input_ids).logits[:, -1:].argmax(-1)

    finding = one(planted(tmp_path, model, run), "cache.lost")
    assert finding.severity is Severity.ERROR
    assert "a single token" in finding.sentence
    assert "has no cached keys" in finding.sentence
    assert finding.sentence.endswith(
        "it attends only to itself, and not to the 10 tokens before it."
    )


def test_a_position_id_that_continues_shows_a_lost_cache_at_once(tmp_path: Path) -> None:
    model = make_model("qwen2")

    def run() -> None:
        model(prompt(), use_cache=False)
        model(prompt(1), position_ids=torch.tensor([[9]]), use_cache=False)

    finding = one(planted(tmp_path, model, run), "cache.lost")
    assert "its position id 9 follows 8" in finding.sentence
    assert "and not to the 9 tokens before it" in finding.sentence


def test_all_layers_cropped_in_the_middle_of_an_answer_are_a_lost_cache(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        input_ids = prompt()
        for step in range(5):
            input_ids = model(input_ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            if step == 2:
                cache.crop(4 - cache.get_seq_length())

    finding = one(planted(tmp_path, model, run), "cache.lost")
    assert finding.severity is Severity.WARNING
    assert (
        "it held 11 and now holds 4, but the text continues with the next token" in finding.sentence
    )


# -- the same text twice, and another text ---------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_that_updates_its_cache_twice_is_named(tmp_path: Path, layer: int) -> None:
    model = make_model("llama")
    inner = model.model.layers[layer].self_attn
    original = inner.forward

    def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
        if hidden_states.shape[1] > 1:
            with torch.no_grad():
                original(hidden_states, **{**kwargs, "attention_mask": None})
            kwargs["attention_mask"] = None
        return original(hidden_states, **kwargs)

    inner.forward = forward
    found = planted(tmp_path, model, lambda: model(prompt(), use_cache=True))
    finding = one(found, "cache.duplicated")
    assert (finding.layer, finding.step) == (layer, 0)
    assert finding.sentence == (
        f"The cache of layer {layer} grew by 18 keys in step 0, which has 9 rows: keys are "
        "stored more than once."
    )


def test_a_repeated_prompt_is_reported(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(prompt(), past_key_values=cache)
        decode(model, prompt(), 3, cache=cache)

    finding = one(planted(tmp_path, model, run), "cache.duplicated")
    assert (finding.severity, finding.step) == (Severity.ERROR, 1)
    assert "repeats all 9 cached tokens" in finding.sentence
    assert "grows from 9 to 18 keys" in finding.sentence
    assert finding.positions == tuple(range(9, 18))


def test_a_whole_conversation_repeated_on_its_own_cache_is_reported(tmp_path: Path) -> None:
    model = make_model("llama")
    whole = prompt(9)

    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(whole, past_key_values=cache)
        model(torch.cat([whole, prompt(4, 8)], 1), past_key_values=cache)

    finding = one(planted(tmp_path, model, run), "cache.duplicated")
    assert "grows from 9 to 22 keys" in finding.sentence


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_that_generate_reuses_for_another_prompt_is_reported(
    tmp_path: Path, static: bool
) -> None:
    model = make_model("llama")

    def run() -> None:
        cache: Any = DynamicCache(config=model.config)
        if static:
            cache = StaticCache(config=model.config, max_cache_len=64)
        options = {"past_key_values": cache, "disable_compile": True}
        greedy(model, prompt(9), **options)
        greedy(model, prompt(20, 7), **options)

    finding = one(planted(tmp_path, model, run), "cache.shared")
    assert (finding.severity, finding.generation, finding.step) == (Severity.ERROR, 1, 0)
    assert finding.sentence.startswith("The cache holds 14 keys of another text: 14 of the first ")


def test_another_text_with_the_same_beginning_on_a_used_cache_is_reported(tmp_path: Path) -> None:
    model = make_model("llama")
    shared = prompt(10, 5)

    def run() -> None:
        cache = DynamicCache(config=model.config)
        for seed in (1, 2):
            decode(model, torch.cat([shared, prompt(4, seed)], 1), 3, cache=cache)

    finding = one(planted(tmp_path, model, run), "cache.shared")
    assert finding.severity is Severity.WARNING
    assert "its first 10 of 14 tokens" in finding.sentence


def test_a_repeated_last_prompt_token_is_reported(tmp_path: Path) -> None:
    """The loop begins with the prompt's last token, which the prefill has read already."""
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(prompt(), past_key_values=cache)
        decode(model, prompt()[:, -1:], 3, cache=cache)

    finding = one(planted(tmp_path, model, run), "cache.duplicated")
    assert (finding.severity, finding.step, finding.positions) == (Severity.WARNING, 1, (9,))
    assert finding.sentence.startswith(
        "The last token of the prompt is in the input twice: step 1 begins"
    )


def test_a_repeated_token_that_the_program_may_have_drawn_is_a_note(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(prompt(), past_key_values=cache)
        fed = prompt()[:, -1:]
        for _ in range(3):
            fed = model(fed, past_key_values=cache).logits[:, -1:].argmin(-1)

    finding = one(planted(tmp_path, model, run), "cache.duplicated")
    assert finding.severity is Severity.NOTE
    assert "it may have been drawn" in finding.sentence


def test_a_prompt_whose_last_token_is_kept_for_the_loop_is_not_reported(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(prompt()[:, :-1], past_key_values=cache)
        decode(model, prompt()[:, -1:], 3, cache=cache)

    assert planted(tmp_path, model, run) == []


# -- not used --------------------------------------------------------------------------------------


def grow(model: Any, n: int = NEW, **options: Any) -> None:
    input_ids = prompt()
    for _ in range(n):
        token = model(input_ids, **options).logits[:, -1:].argmax(-1)
        input_ids = torch.cat([input_ids, token], 1)


@pytest.mark.parametrize("options", [{"use_cache": False}, {}], ids=["no cache", "a new one each"])
def test_a_loop_that_recomputes_everything_is_reported_once_with_its_count(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = make_model("gpt_neox")
    finding = one(planted(tmp_path, model, lambda: grow(model, **options)), "cache.not-used")
    severity = Severity.NOTE if options else Severity.WARNING
    assert (finding.severity, finding.step, finding.last_step) == (severity, 1, 5)
    passed = " (use_cache=False was passed)" if options else ""
    assert finding.sentence == (
        "No cache is used: q length grows 9, 10, 11, ... to 14; 6 steps computed 69 query rows, "
        f"where 14 are enough with a cache{passed}."
    )


def test_generate_without_a_cache_is_reported(tmp_path: Path) -> None:
    model = make_model("llama")
    run = lambda: greedy(model, prompt(), use_cache=False)  # noqa: E731
    finding = one(planted(tmp_path, model, run), "cache.not-used")
    assert (finding.severity, finding.evidence["needed"]) == (Severity.NOTE, 14)


def test_two_forwards_are_no_loop(tmp_path: Path) -> None:
    model = make_model("llama")
    assert planted(tmp_path, model, lambda: grow(model, 2, use_cache=False)) == []


# -- slots -----------------------------------------------------------------------------------------


@pytest.fixture
def interface() -> Iterator[Callable[[str, Any], None]]:
    names = []

    def register(name: str, function: Any) -> None:
        names.append(name)
        AttentionInterface.register(name, function)

    yield register
    for name in names:
        AttentionInterface._global_mapping.pop(name)


def sees(n_open: Callable[[int, int], int], layers: tuple[int, ...] = (0, 1, 2)) -> Any:
    """Return an attention whose newest row attends to the first `n_open(rows, keys)` keys."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        rows, keys = q.shape[2], k.shape[2]
        filled = state["filled"] if rows == 1 else rows
        stop = n_open(filled, keys) if module.layer_idx in layers else filled

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (j <= i) if rows > 1 else (j < stop)

        block = create_block_mask(mask_mod, None, None, rows, keys, "cpu")
        out = flex_attention(q, k, v, block_mask=block, scale=kw["scaling"], enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    state = {"filled": 0}
    attention.state = state  # type: ignore[attr-defined]
    return attention


def static_loop(model: Any, attention: Any, cache: Any, input_ids: Tensor, n: int = 3) -> None:
    for _ in range(n):
        attention.state["filled"] += input_ids.shape[1]
        input_ids = model(input_ids, past_key_values=cache).logits[:, -1:].argmax(-1)


@pytest.mark.parametrize("layers", [(0, 1, 2), (1,)])
def test_empty_slots_of_a_static_cache_in_use_are_weighed(
    tmp_path: Path, interface: Any, layers: tuple[int, ...]
) -> None:
    attention = sees(lambda filled, keys: keys, layers)
    interface("open", attention)
    model = make_model("llama")
    model.set_attn_implementation("open")
    cache = StaticCache(config=model.config, max_cache_len=32)
    found = planted(tmp_path, model, lambda: static_loop(model, attention, cache, prompt()))
    finding = one(found, "cache.empty-slots")
    assert (finding.severity, finding.step, finding.layer) == (Severity.ERROR, 1, layers[0])
    assert (finding.evidence["allowed"], finding.evidence["filled"]) == (32, 10)
    assert "32 keys open, 10 filled: " in finding.sentence
    assert 0.05 < finding.evidence["weight"] < 0.95
    assert finding.times == 2
    assert of(found, "cache.stale-slots") == []


def test_slots_of_an_earlier_text_in_use_are_stale(tmp_path: Path, interface: Any) -> None:
    attention = sees(lambda filled, keys: filled + 2)
    interface("stale", attention)
    model = make_model("llama")
    model.set_attn_implementation("stale")
    cache = StaticCache(config=model.config, max_cache_len=32)

    def run() -> None:
        static_loop(model, attention, cache, prompt(20))
        for layer in cache.layers:  # counts from 0 again, and the keys stay
            layer.cumulative_length.zero_()
        attention.state["filled"] = 0
        static_loop(model, attention, cache, prompt(9, 4))

    found = planted(tmp_path, model, run)
    finding = one(found, "cache.stale-slots")
    assert (finding.generation, finding.step, finding.evidence["slots"]) == (1, 1, 2)
    assert "12 keys open, 10 filled" in finding.sentence


def test_a_cache_of_the_users_own_is_weighed_by_its_keys_of_zeros(
    tmp_path: Path, interface: Any
) -> None:
    """The number of filled slots is unknown: a patched attention keeps its own buffer."""
    kept: dict[int, list[Tensor]] = {}

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        buffers = kept.setdefault(
            module.layer_idx, [torch.zeros(1, k.shape[1], 24, k.shape[3]) for _ in range(2)]
        )
        at = 0 if q.shape[2] > 1 else 9
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer[:, :, at : at + new.shape[2]] = new
        opened = create_block_mask(
            (lambda b, h, i, j: j <= i) if not at else (lambda b, h, i, j: j >= 0),
            *(None, None, q.shape[2], 24, "cpu"),
        )
        out = flex_attention(q, *buffers, block_mask=opened, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    interface("kept", attention)
    model = make_model("llama")
    model.set_attn_implementation("kept")

    def run() -> None:
        model(prompt(9), use_cache=False)
        model(prompt(1), position_ids=torch.tensor([[9]]), use_cache=False)

    finding = one(planted(tmp_path, model, run), "cache.empty-slots")
    assert (finding.evidence["allowed"], finding.evidence["filled"]) == (24, 10)


def test_queries_and_keys_padded_with_zeros_to_whole_blocks_are_not_reported(
    tmp_path: Path,
) -> None:
    """The rows of padding see each other, and no row reads them."""
    script = tmp_path / "padded.py"
    script.write_text(
        "import torch\n"
        "from torch.nn.attention.flex_attention import create_block_mask, flex_attention\n"
        "q, k, v = (torch.cat([torch.randn(1, 2, n, 16), torch.zeros(1, 2, m - n, 16)], 2)\n"
        "           for n, m in ((50, 64), (100, 128), (100, 128)))\n"
        "made = create_block_mask(lambda b, h, i, j: j <= i + 64, None, None, 64, 128, 'cpu')\n"
        "flex_attention(q, k, v, block_mask=made)\n"
        "flex_attention(*(torch.zeros(1, 1, n, 16) for n in (1, 8, 8)))\n"
    )
    out = tmp_path / "padded.flextrace"
    ran = run_warm(["-m", "flexinspect", "run", "--no-ui", "--out", str(out), str(script)])
    assert ran.code == 0, ran
    with open_trace(out) as reader:
        assert len(reader.generations()) == 2
        assert serious(reader.findings()) == []


# -- correct ---------------------------------------------------------------------------------------

CORRECT: dict[str, Callable[[Any], Any]] = {
    "generate": lambda m: greedy(m, prompt()),
    "static": lambda m: greedy(m, prompt(), cache_implementation="static", disable_compile=True),
    "beams": lambda m: greedy(m, prompt(), num_beams=3),
    "sampled": lambda m: greedy(m, prompt(), do_sample=True, top_k=5),
    "loop": lambda m: decode(m, prompt()),
    "lazy cache": lambda m: decode(m, prompt(), cache=DynamicCache()),
    "one token": lambda m: decode(m, prompt(1)),
    "twice": lambda m: [greedy(m, prompt(n)) for n in (1, 1, 7)],
    "prompt lookup": lambda m: greedy(m, prompt(), prompt_lookup_num_tokens=3),
    "batch": lambda m: greedy(m, torch.cat([prompt(), prompt(9, 5)])),
}


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_correct_caches_are_not_reported(tmp_path: Path, name: str, level: str) -> None:
    model = make_model("llama")
    found = planted(tmp_path, model, lambda: CORRECT[name](model), level=level)
    assert serious(found) == about_caches(found) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["static", "loop"])
def test_caches_of_all_families_are_not_reported(tmp_path: Path, family: str, name: str) -> None:
    """Prompts longer than the windows of those that slide."""
    model = make_model(family).to(torch.bfloat16)
    input_ids = prompt(14)
    runs: dict[str, Callable[[], Any]] = {
        "static": lambda: greedy(
            model, input_ids, cache_implementation="static", disable_compile=True
        ),
        "loop": lambda: decode(model, input_ids),
    }
    found = planted(tmp_path, model, runs[name])
    assert serious(found) == about_caches(found) == []


def test_assisted_generation_is_not_reported(tmp_path: Path) -> None:
    """Rejected drafts are cropped from the caches."""
    model, assistant = make_model("llama"), make_model("llama", num_hidden_layers=1)
    found = planted(tmp_path, model, lambda: greedy(model, prompt(), assistant_model=assistant))
    assert serious(found) == about_caches(found) == []


def test_chunks_turns_and_crops_are_not_reported(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        for part in prompt(14).split(5, dim=1):
            model(part, past_key_values=cache)
        decode(model, prompt(1), 3, cache=cache)
        decode(model, prompt(6, 9), 3, cache=cache)
        cache.crop(-3)
        decode(model, prompt(4, 8), 3, cache=cache)

    found = planted(tmp_path, model, run)
    assert serious(found) == about_caches(found) == []


def test_a_further_turn_of_generate_on_its_own_cache_is_not_reported(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        generated = greedy(model, prompt(), past_key_values=cache)
        longer = torch.cat([generated, prompt(5, 8)], 1)
        greedy(model, longer, past_key_values=cache)
        other = DynamicCache(config=model.config)
        greedy(model, prompt(12, 2), past_key_values=other)
        again = torch.cat([longer, prompt(9, 4)], 1)
        greedy(model, again[:, :30], past_key_values=DynamicCache(config=model.config))

    found = planted(tmp_path, model, run)
    assert serious(found) == about_caches(found) == []


def test_a_mask_that_lets_early_rows_see_late_ones_needs_no_cache(tmp_path: Path) -> None:
    """A cache would keep rows that change when a token comes."""
    model = make_model("llama")
    model.set_attn_implementation("eager")

    def run() -> None:
        input_ids = prompt()
        for _ in range(4):
            n = input_ids.shape[1]
            mask = torch.zeros(1, 1, n, n)
            token = model(input_ids, attention_mask=mask, use_cache=False).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token], 1)

    assert of(planted(tmp_path, model, run), "cache.not-used") == []


def test_a_layer_that_shares_the_keys_of_another_is_not_reported(tmp_path: Path) -> None:
    """It stores no keys, but attends to all keys."""
    model = make_model("llama")
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    cache = DynamicCache(config=model.config)
    update = cache.update

    def shared(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        if layer == 2:
            return seen["1"]
        found = update(keys, values, layer, *args, **kwargs)
        seen[str(layer)] = found
        return found

    cache.update = shared
    del cache.layers[2]
    found = planted(tmp_path, model, lambda: decode(model, prompt(), cache=cache))
    assert about_caches(found) == []
