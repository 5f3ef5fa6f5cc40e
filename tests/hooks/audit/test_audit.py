"""What an audit judges, what it does not, and that it leaves the program alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.audits import Audit, decode
from support.tiny import ids, make_model
from torch import nn
from transformers import AttentionInterface, DynamicCache, QuantizedCache

from flexinspect.core import plugins
from flexinspect.records.finding import Severity
from flexinspect_hooks.audit.evidence.row_comparison import Divergence
from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit
from flexinspect_hooks.audit.forward.forward_run import LOGITS, Run
from flexinspect_hooks.audit.forward.weights import snapshot
from flexinspect_hooks.audit.hypotheses import load_hypotheses
from flexinspect_hooks.audit.program_audit import Verdict
from flexinspect_hooks.audit.reference.clean_classes import replaced_names
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel
from flexinspect_hooks.audit.session_audit import (
    AuditBudget,
    describe_verdict,
    summarize_verdicts,
)


def test_every_step_of_a_correct_loop_agrees(audit: Audit) -> None:
    model = make_model("llama")
    verdicts, findings, events = audit(model, lambda: decode(model))
    assert [(one.n_steps, one.n_rows, one.divergence) for one in verdicts] == [(3, 14, None)]
    assert not findings
    assert "3 steps, 14 rows agree with the untouched implementation" in events[0]


def test_an_audit_changes_neither_weights_nor_random_numbers(audit: Audit) -> None:
    model = make_model("gemma2")
    before = {name: one.clone() for name, one in model.state_dict().items()}
    states = []
    audit(model, lambda: decode(model), after=lambda: states.append(torch.get_rng_state()))
    assert torch.equal(states[0], torch.get_rng_state())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_weights_that_were_modified_later_are_not_judged(audit: Audit) -> None:
    model = make_model("llama")
    verdicts, findings, events = audit(
        model, lambda: decode(model), after=lambda: model.lm_head.weight.add_(1)
    )
    assert not verdicts
    assert not findings
    assert events == ["The steps were not audited: The weights were modified after the steps ran."]


@pytest.mark.parametrize("in_place", [True, False])
def test_each_generation_is_judged_with_the_weights_that_it_had(
    audit: Audit, in_place: bool
) -> None:
    model = make_model("llama")

    def program() -> None:
        decode(model)
        weight = model.model.layers[1].mlp.up_proj.weight
        if in_place:
            weight.data += 0.1  # which no counter of torch sees
        else:
            model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight + 0.1)
        decode(model)

    verdicts, findings, events = audit(model, program)
    assert not findings
    judged = [one.n_steps for one in verdicts]
    assert judged == ([0, 3] if in_place else [3, 3])  # what was overwritten is lost
    lost = "Not judged: the weights were modified after the steps ran."
    assert (lost in " ".join(events)) is in_place


def test_batch_rows_with_one_fault_have_one_finding(audit: Audit) -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.scaling *= 2

    def program() -> None:
        model(torch.tensor([ids(12, 3), ids(12, 4), ids(12, 5)]))

    _, (first, *others), _ = audit(model, program)
    assert first.severity is Severity.ERROR
    assert [one.severity for one in others] == [Severity.NOTE] * 2
    assert all(
        one.sentence.endswith(f"This follows from {first.id} of batch row 0.") for one in others
    )


@pytest.mark.parametrize("rank", [2, 40])
def test_a_hook_that_adds_a_low_rank_change_is_said_to_be_like_an_adapter(
    audit: Audit, rank: int
) -> None:
    model = make_model("llama")
    module = model.model.layers[1].mlp.down_proj
    down, up = torch.randn(module.in_features, rank), torch.randn(rank, module.out_features)
    module.register_forward_hook(lambda module, args, output: output + args[0] @ down @ up)
    _, (finding,), _ = audit(model, lambda: model(torch.tensor([ids(30, 3)])))
    assert (finding.id, finding.severity) == ("audit.hook", Severity.NOTE)
    assert ("as an adapter of that rank gives" in finding.sentence) is (rank == 2)


def test_layers_with_buffers_of_their_own_are_not_judged(audit: Audit) -> None:
    class Buffers(DynamicCache):
        def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
            return 0

        def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            return keys.repeat(1, 1, 8, 1), values.repeat(1, 1, 8, 1)

    model = make_model("llama")
    arguments = {"position_ids": torch.tensor([[7]]), "past_key_values": Buffers()}
    _, findings, events = audit(model, lambda: model(torch.tensor([[5]]), **arguments))
    assert not findings
    assert "buffers of their own" in events[0]


def test_a_training_step_is_not_judged(audit: Audit) -> None:
    model = make_model("llama").train()

    def step() -> None:
        with torch.enable_grad():
            model(torch.tensor([ids(12, 3)]))

    _, findings, events = audit(model, step)
    assert not findings
    assert events == [
        "Generation 0: no step was judged. Not judged: a training step is not a generation."
    ]


@pytest.mark.parametrize("broken", [True, False])
def test_a_generation_in_training_mode_with_gradients_is_judged(audit: Audit, broken: bool) -> None:
    model = make_model("llama").train()
    if broken:
        model.model.layers[1].self_attn.scaling *= 2

    def generate() -> None:
        cache, rows = None, torch.tensor([ids(12, 3)])
        with torch.enable_grad():
            for _ in range(3):
                output = model(rows, past_key_values=cache, use_cache=True)
                cache, rows = output.past_key_values, output.logits[:, -1:].argmax(-1)

    _, findings, events = audit(model, generate)
    assert [one.id for one in findings] == ["audit.reproduced"] * broken
    assert events[0].startswith("Generation 0: 3 steps, 14 rows")


class LowRank(nn.Module):
    """A linear layer with a low-rank change, with noise in it if it is `random`."""

    def __init__(self, base: nn.Linear, *, random: bool) -> None:
        super().__init__()
        self.base, self.random = base, random
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(()) if self.random else 0.5
        output: torch.Tensor = self.base(x) + noise * (x @ self.down.T @ self.up.T)
        return output


@pytest.mark.parametrize("random", [False, True])
def test_an_adapter_made_by_hand_is_used_as_it_is_if_it_is_a_function_of_its_input(
    audit: Audit, random: bool
) -> None:
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    attention.q_proj = LowRank(attention.q_proj, random=random)
    prompt = torch.tensor([ids(12, 3)])
    verdicts, findings, events = audit(
        model, lambda: model.generate(prompt, max_new_tokens=3, do_sample=False)
    )
    assert not findings
    if random:
        assert not verdicts
        assert "replaced model.layers.1.self_attn.q_proj (Linear) by LowRank" in events[0]
    else:
        assert [(one.n_steps, one.not_judged) for one in verdicts] == [(3, [])]
        assert "low-rank adapters of the program are used as they are" in events[0]


def beam_search(model: Any, *, reorders: bool, n_rows: int = 3, ranks_again: bool = False) -> None:
    """Search with beams by hand, over copies of one prompt; or rank tokens again alone."""
    cache = DynamicCache(config=model.config)
    fed = torch.tensor([ids(12, 3)] * n_rows)
    scores = torch.tensor([0.0] + [-torch.inf] * (n_rows - 1))
    for _ in range(8):
        table = model(fed, past_key_values=cache).logits[:, -1].log_softmax(-1)
        scores, places = (scores[:, None] + table).flatten().topk(n_rows)
        fed = (places % table.shape[1])[:, None]
        if reorders:
            cache.reorder_cache(places // table.shape[1])
        if ranks_again:
            fed, scores = fed.flip(0), scores.flip(0)


def test_beams_are_followed_through_a_reordered_cache(audit: Audit) -> None:
    model = make_model("llama")
    verdicts, findings, _ = audit(model, lambda: beam_search(model, reorders=True))
    assert not findings
    assert [(one.n_steps, one.not_judged) for one in verdicts] == [(8, [])] * 3


def test_a_cache_row_from_another_beam_is_named(audit: Audit) -> None:
    model = make_model("llama")
    _, (finding,), _ = audit(model, lambda: beam_search(model, reorders=False))
    assert finding.id == "audit.reproduced"
    assert "in which the cache row is from another beam: row 1 was fed" in finding.sentence


def test_tokens_that_are_ranked_again_after_the_cache_was_reordered_are_named(
    audit: Audit,
) -> None:
    model = make_model("llama")
    program = lambda: beam_search(model, reorders=True, ranks_again=True)  # noqa: E731
    _, (finding,), _ = audit(model, program)
    assert "so the cache and the tokens are in another order" in finding.sentence
    assert finding.step == 2


def test_beams_of_several_prompts_are_followed_in_generate(audit: Audit) -> None:
    model, prompts = make_model("llama"), torch.tensor([ids(12, 3), ids(12, 4)])
    options = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}
    verdicts, findings, _ = audit(model, lambda: model.generate(prompts, **options))
    assert not findings
    assert [one.n_steps for one in verdicts] == [4] * 4


def test_equal_rows_of_a_cache_that_shows_no_keys_are_not_judged(audit: Audit) -> None:
    model = make_model("llama")

    def sample() -> None:
        rows, cache = torch.tensor([ids(12, 3)] * 2), QuantizedCache("fp8", model.config)
        for n in range(3):
            model(rows, past_key_values=cache)
            rows = torch.tensor([ids(1, n), ids(1, n + 9)])

    verdicts, findings, _ = audit(model, sample)
    assert not findings
    assert [one.n_steps for one in verdicts] == [1, 1]
    assert all("the cache is quantised" in one.not_judged[0] for one in verdicts)
    nothing = summarize_verdicts([replace(one, n_steps=0) for one in verdicts])
    assert nothing.startswith("No step of 2 sequences was compared")


def test_a_summary_says_which_sequences_were_not_judged() -> None:
    judged, partly = Verdict(0, 0, n_steps=3), Verdict(0, 2, n_steps=1, not_judged=["the end"])
    none = Verdict(0, 1, not_judged=["the trace has the masks of batch row 0 only"])
    begins = "were compared with the untouched implementation: none differs."
    assert summarize_verdicts([judged, none]) == (
        f"3 steps of 1 sequence {begins} Generation 0, batch row 1 was not judged: the trace has "
        "the masks of batch row 0 only."
    )
    assert summarize_verdicts([judged, none, none, partly]) == (
        f"4 steps of 2 sequences {begins} Generation 0, batch row 2 was judged only in part, and "
        "not: the end. 2 sequences were not judged, the first one is generation 0, batch row 1: "
        "the trace has the masks of batch row 0 only (flexinspect audit TRACE lists all)."
    )
    found = Divergence(0, (LOGITS, None), 0, 1.0, 0.1)
    assert summarize_verdicts([judged, replace(judged, divergence=found)]).endswith(
        "implementation: 1 of the sequences differs."
    )


def decode_embeddings(model: Any, *, is_first: bool) -> None:
    """Decode after 5 rows of embeddings, which are the first ones or follow a prompt of ids."""
    fed = [{"inputs_embeds": torch.randn(1, 5, model.config.hidden_size)}]
    fed += [{"input_ids": torch.tensor([ids(n, 3)])} for n in ((1, 1) if is_first else (1,))]
    cache = DynamicCache(config=model.config)
    for arguments in fed if is_first else [{"input_ids": torch.tensor([ids(4, 3)])}, *fed]:
        model(**arguments, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(("is_first", "step"), [(True, 1), (False, 2)])
def test_steps_after_embeddings_say_that_their_ids_are_not_known(
    audit: Audit, is_first: bool, step: int
) -> None:
    model = make_model("llama")
    verdicts, findings, _ = audit(model, lambda: decode_embeddings(model, is_first=is_first))
    assert findings == []
    assert [one.not_judged for one in verdicts] == [
        [f"from step {step} on: 5 rows were given as inputs_embeds, without token ids"]
    ]


def test_a_model_of_no_known_architecture_is_not_judged(audit: Audit) -> None:
    from transformers import PreTrainedConfig, PreTrainedModel

    class Own(PreTrainedModel):  # type: ignore[misc]
        config_class = PreTrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embedding = torch.nn.Embedding(300, 300)

        def forward(self, input_ids: Any) -> Any:
            return (self.embedding(input_ids),)

    model = Own(PreTrainedConfig())
    _, findings, events = audit(model, lambda: model(torch.tensor([ids(12, 3)])))
    assert not findings
    assert "not an architecture of transformers" in events[0]


def test_a_search_that_ran_out_of_time_says_so(audit: Audit, monkeypatch: Any) -> None:
    monkeypatch.setattr(AuditBudget, "deadline", lambda self: 0.0)
    model = make_model("llama")
    verdicts, _, events = audit(model, lambda: decode(model))
    assert [one.n_steps for one in verdicts] == [0]
    assert events == ["Generation 0: no step was judged. Not judged: the time was used up."]


@pytest.fixture
def patched_rope() -> Iterator[Any]:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda q, k, *_args, **_kwargs: (q, k)
    yield modeling_llama
    modeling_llama.apply_rotary_pos_emb = original


def test_a_replaced_function_does_not_reach_the_reference(patched_rope: Any) -> None:
    model = make_model("llama")
    assert replaced_names(type(model)) == ["apply_rotary_pos_emb"]
    positions = torch.arange(12)[None]
    rows = ids(12, 3)
    clean = ReferenceModel(snapshot(model)).run(rows, Run(positions), range(12))[LOGITS, None]
    with torch.no_grad():
        faulty = model(torch.tensor([rows])).logits
    assert not torch.allclose(clean, faulty, atol=1e-2)


def test_a_fault_of_a_plug_in_is_tried(audit: Audit, monkeypatch: Any) -> None:
    def cold(probe: Any) -> Iterator[ForwardEdit]:
        def attention(call: Any) -> Any:
            return replace(call, query=call.query / 2)

        yield ForwardEdit(
            name="softmax.cold", sentence="with scores divided by 2", attention=attention
        )

    group = {"own": "tests:cold"}
    monkeypatch.setattr(plugins, "BUILT_IN", {**plugins.BUILT_IN, plugins.HYPOTHESES: group})
    monkeypatch.setattr(plugins, "_import", lambda point: cold)
    assert load_hypotheses() == ([cold], {})
    model = make_model("llama")
    for block in model.model.layers:
        block.self_attn.scaling /= 2
    import flexinspect_hooks.audit.program_audit as module

    monkeypatch.undo()
    monkeypatch.setattr(module, "load_hypotheses", lambda: ([cold], {}))
    _, findings, _ = audit(model, lambda: decode(model))
    assert ["with scores divided by 2" in one.sentence for one in findings] == [True]


def test_where_nothing_fits_the_finding_says_what_was_tried(audit: Audit) -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.ELU()
    verdicts, findings, events = audit(model, lambda: decode(model, 2))
    assert [one.id for one in findings] == ["audit.unexplained"]
    assert findings[0].sentence.startswith('Layer 1, step 0: from position 0 "')
    assert "the hidden state differs" in findings[0].sentence
    assert (
        "Alone, on the right input, model.layers.1.mlp.act_fn (ELU) is wrong"
        in findings[0].sentence
    )
    assert "The program replaced model.layers.1.mlp.act_fn (by ELU)." in findings[0].sentence
    assert findings[0].sentence.endswith("that were tried gives these numbers.")
    assert describe_verdict(verdicts[0]) == events[0]


def test_a_forward_that_was_replaced_in_the_layer_of_the_difference_is_named(audit: Audit) -> None:
    model = make_model("llama")
    for layer in (1, 2):
        projection = model.model.layers[layer].self_attn.q_proj
        plain = projection.forward
        projection.forward = lambda rows, plain=plain: plain(rows) + rows  # an adapter, for example
    _, findings, _ = audit(model, lambda: decode(model, 2))
    assert [one.id for one in findings] == ["audit.unexplained"]
    assert "its output is its input added to the right one" in findings[0].sentence
    assert "The program replaced model.layers.1.self_attn.q_proj.forward (" in findings[0].sentence
    assert "<lambda> at test_audit.py:" in findings[0].sentence


def _without_mlp_residual(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
    """Compute a layer of Llama or of Gemma 2, but forget the second residual."""
    before = hidden_states
    rows, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    if not hasattr(self, "pre_feedforward_layernorm"):
        return self.mlp(self.post_attention_layernorm(before + rows))
    rows = before + self.post_attention_layernorm(rows)
    return self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(rows)))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_missing_residual_of_the_mlp_is_named(audit: Audit, family: str) -> None:
    model = make_model(family)
    layer = model.model.layers[1]
    layer.forward = MethodType(_without_mlp_residual, layer)
    _, findings, _ = audit(model, lambda: decode(model, 2))
    words = "without the residual around mlp in this layer only"
    assert [words in one.sentence for one in findings] == [True], findings


def _norms_after_residuals(which: tuple[str, ...]) -> Any:
    """Return a forward of a layer of OLMo 2 in which some norms are of the sum."""

    def forward(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        rows, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
            if name == "post_feedforward_layernorm":
                rows = self.mlp(hidden_states)
            norm = getattr(self, name)
            is_of_sum = name in which
            total = hidden_states + rows
            hidden_states = norm(total) if is_of_sum else hidden_states + norm(rows)
        return hidden_states

    return forward


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (("post_attention_layernorm",), "the output of the attention, not"),
        (("post_feedforward_layernorm",), "the output of the MLP, not"),
        (
            ("post_attention_layernorm", "post_feedforward_layernorm"),
            "the output of the two blocks, not",
        ),
    ],
)
def test_a_norm_of_the_sum_with_the_residual_is_named(
    audit: Audit, which: tuple[str, ...], words: str
) -> None:
    model = make_model("olmo2")
    layer = model.model.layers[1]
    layer.forward = MethodType(_norms_after_residuals(which), layer)
    _, findings, _ = audit(model, lambda: decode(model, 2))
    sentence = f"in which {' and '.join(which)} "
    assert [sentence in o.sentence and words in o.sentence for o in findings] == [True], findings


def test_a_number_of_a_module_that_is_not_the_configurations_is_named(audit: Audit) -> None:
    model = make_model("llama")
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.1
    _, findings, _ = audit(model, lambda: decode(model, 2))
    words = "in which post_attention_layernorm.variance_epsilon is 0.1, not 1e-06"
    assert [words in one.sentence for one in findings] == [True], findings


def test_a_missing_scale_of_the_embeddings_is_named(audit: Audit) -> None:
    options = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9}
    model = make_model("gemma3_text", **options)
    embedding = model.model.embed_tokens
    embedding.forward = lambda rows: torch.nn.functional.embedding(rows, embedding.weight)
    _, findings, _ = audit(model, lambda: decode(model, 2))
    words = "without the scale of the embeddings"
    assert [words in one.sentence for one in findings] == [True], findings


@pytest.mark.parametrize("passes_positions", [False, True])
def test_positions_that_count_the_padding_are_a_fault_of_learned_positions(
    audit: Audit, passes_positions: bool
) -> None:
    model = make_model("gpt2")
    rows = torch.tensor([ids(12, 3), (0,) * 4 + ids(8, 4)])
    mask = (rows != 0).long()

    def decode_batch() -> None:
        given, past, seen = rows, None, mask
        for _ in range(3):
            positions = (seen.cumsum(-1) - 1).clamp_min(0)[:, -given.shape[1] :]
            more = {"position_ids": positions} if passes_positions else {}
            output = model(given, attention_mask=seen, past_key_values=past, **more)
            past, given = output.past_key_values, output.logits[:, -1:].argmax(-1)
            seen = torch.cat((seen, torch.ones(2, 1, dtype=torch.long)), 1)

    _, findings, _ = audit(model, decode_batch)
    words = "the position ids that the model makes if none are passed, which count the padding"
    expected = [] if passes_positions else [True]
    assert [words in one.sentence for one in findings] == expected, findings


def test_heads_and_rows_that_are_not_swapped_are_named(audit: Audit) -> None:
    def mixed(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        is_prompt = q.shape[2] > 1
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_prompt, enable_gqa=True
        )
        return output.reshape(output.transpose(1, 2).shape), None

    model = make_model("llama")
    AttentionInterface.register("mixed", mixed)
    try:
        model.set_attn_implementation("mixed")
        _, findings, _ = audit(model, lambda: decode(model, 1))
    finally:
        del AttentionInterface._global_mapping["mixed"]
    words = "whose heads and rows are not swapped before they are flattened"
    assert [words in one.sentence for one in findings] == [True], findings


class Wrapper(torch.nn.Module):
    """A module around another one; `rows` is how many rows it looks at together."""

    def __init__(self, base: torch.nn.Module, *, mixes_rows: bool = False) -> None:
        super().__init__()
        self.base, self.mixes_rows = base, mixes_rows

    def forward(self, rows: Any) -> Any:
        output = self.base(rows) * 1.5
        return output - output.mean(1, keepdim=True) if self.mixes_rows else output


class Int8(torch.nn.Module):
    """A linear layer in int8 with a scale for each output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, rows: Any) -> Any:
        weight: Any = self.weight
        return torch.nn.functional.linear(rows, weight.to(rows.dtype) * self.scale)


@pytest.mark.parametrize("place", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp"])
@pytest.mark.parametrize("make", [Wrapper, Int8])
def test_a_module_of_the_program_is_used_as_it_is_and_the_rest_is_judged(
    audit: Audit, place: str, make: Any
) -> None:
    model = make_model("llama")
    parent, _, last = f"model.layers.1.{place}".rpartition(".")
    owner = model.get_submodule(parent)
    if make is Int8 and place == "mlp":
        return  # no linear layer
    setattr(owner, last, make(getattr(owner, last)))
    verdicts, findings, events = audit(model, lambda: decode(model))
    assert not findings
    assert [(one.n_steps, one.divergence) for one in verdicts] == [(3, None)]
    name = f"model.layers.1.{place} ({make.__name__})"
    assert f"modules of the program are used as they are: {name}" in events[0]


def test_a_fault_beside_a_module_of_the_program_is_found(audit: Audit) -> None:
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    attention.o_proj = Int8(attention.o_proj)
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda states: own(states) * 1.5
    _, findings, _ = audit(model, lambda: decode(model))
    assert len(findings) == 1
    assert findings[0].layer == 0


def test_a_module_of_the_program_that_mixes_rows_is_not_judged_and_named(audit: Audit) -> None:
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    attention.q_proj = Wrapper(attention.q_proj, mixes_rows=True)
    _, findings, events = audit(model, lambda: decode(model))
    assert not findings
    replaced = "The program replaced model.layers.1.self_attn.q_proj (Linear) by Wrapper"
    assert replaced in events[0]


def test_numbers_that_are_not_finite_are_a_divergence(audit: Audit) -> None:
    model = make_model("llama")
    handle = model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: output * float("nan")
    )
    _, findings, _ = audit(model, lambda: decode(model, 1))
    handle.remove()
    assert len(findings) == 1
    assert "the hidden state has NaN or Inf" in findings[0].sentence


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (slice(2, 7), "all but the first 2 and newest 5 of 12 cache rows hold zeros"),
        (slice(3, 4), "the cache row 3 holds zeros"),
        (slice(0, 9), "all but the newest 3 of 12 cache rows hold zeros"),
    ],
)
def test_cache_rows_that_are_zeroed_in_place_are_named(
    audit: Audit, rows: slice, words: str
) -> None:
    model = make_model("llama")

    def program() -> None:
        past = DynamicCache()
        logits = model(torch.tensor([ids(12, 3)]), past_key_values=past, use_cache=True).logits
        for layer in past.layers:
            layer.keys[:, :, rows] = 0
            layer.values[:, :, rows] = 0
        for _ in range(2):
            fed = logits[:, -1:].argmax(-1)
            logits = model(fed, past_key_values=past, use_cache=True).logits

    _, findings, _ = audit(model, program)
    assert [words in one.sentence for one in findings] == [True], findings
    assert findings[0].step == 1


def test_keys_that_decode_steps_do_not_read_any_more_are_counted(audit: Audit) -> None:
    model = make_model("llama")
    right = nn.functional.scaled_dot_product_attention

    def evicting(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        if query.shape[2] == 1:
            key, value = (torch.cat((one[:, :, :1], one[:, :, 8:]), 2) for one in (key, value))
        return right(query, key, value, *args, **options)

    def own(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        output = evicting(query, key, value, is_causal=query.shape[2] > 1)
        return output.transpose(1, 2), None

    AttentionInterface.register("evicting", own)
    model.config._attn_implementation = "evicting"
    _, findings, _ = audit(model, lambda: decode(model))
    assert any(
        "decode rows read only the first 1 and newest 4 of 12 cached keys" in one.sentence
        for one in findings
    ), findings
