"""The trainings of an unchanged program: each optimizer with its model, as in a plain run."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.captures import capture
from support.warm_python import Ran, run

from flexinspect.trace.reader import TraceReader, open_trace

HEAD = """
import json, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
torch.set_num_threads(1)
def tell(*models):
    print(json.dumps([float(p.double().sum()) for m in models for p in m.parameters()]))
"""


def recorded(folder: Path, script: str) -> tuple[Ran, Path]:
    file, out = folder / "train.py", folder / "t.flextrace"
    file.write_text(HEAD + textwrap.dedent(script), "utf-8")
    done = capture(file, out)
    assert done.code == 0, done.err
    return done, out


def trainings(reader: TraceReader) -> dict[str, list[Any]]:
    """Return the steps of each training by the name of its model."""
    rows = reader.generations()
    assert all("training" in row.declared for row in rows)
    return {row.model: [*reader.training_steps(row.generation).values()] for row in rows}


GAN = """
G, D = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
first, second = torch.optim.Adam(D.parameters(), lr=1e-2), torch.optim.Adam(G.parameters(), lr=1e-2)
losses = []
for _ in range(4):
    D.zero_grad()
    real = F.binary_cross_entropy(D(torch.randn(8, 2)), torch.ones(8, 1))
    real.backward()
    fake = G(torch.randn(8, 4))
    made = F.binary_cross_entropy(D(fake.detach()), torch.zeros(8, 1))
    made.backward()
    first.step()
    G.zero_grad()
    loss = F.binary_cross_entropy(D(fake), torch.ones(8, 1))
    loss.backward()
    second.step()
    losses.append([(real.item() + made.item()) / 2, loss.item()])
print(json.dumps(losses))
tell(G, D)
print(nn.Module.__call__.__name__, F.dropout.__module__)
"""


def test_two_optimizers_are_two_trainings_with_their_own_losses(tmp_path: Path) -> None:
    done, out = recorded(tmp_path, GAN)
    losses = json.loads(done.lines[0])
    with open_trace(out) as reader:
        found = trainings(reader)
        assert reader.findings() == []
    assert [*found] == ["D", "G"]
    for number, name in enumerate(found):
        assert [step.loss for step in found[name]] == pytest.approx([one[number] for one in losses])
        assert {step.loss_source for step in found[name]} == {"backward"}
    # What flows through D to G is cleared, and belongs to no step of D.
    assert [step.n_backward for step in found["D"]] == [2] * 4
    assert [step.n_backward for step in found["G"]] == [1] * 4


def test_a_recorded_training_is_bit_equal_and_torch_is_left_as_it_was(tmp_path: Path) -> None:
    done, _ = recorded(tmp_path, GAN)
    command = [sys.executable, str(tmp_path / "train.py")]
    plain = run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.lines == plain.stdout.splitlines()


PARTS = """
encoder, decoder = nn.Linear(8, 4), torch.compile(nn.Linear(4, 8), backend="eager")
optimizer = torch.optim.LBFGS([*encoder.parameters(), *decoder.parameters()], max_iter=3)
x = torch.randn(16, 8)
def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(decoder(torch.tanh(encoder(x))), x)
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
class Direct(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
    def forward(self, x):
        return self.layer(x)
model = Direct()
second = torch.optim.SGD(model.layer.parameters(), lr=0.1)
for _ in range(2):
    second.zero_grad()
    F.linear(x, model.layer.weight, model.layer.bias).mean().backward()
    second.step()
"""


def test_parts_closures_and_a_model_that_is_never_called(tmp_path: Path) -> None:
    _, out = recorded(tmp_path, PARTS)
    with open_trace(out) as reader:
        found = trainings(reader)
        groups = [reader.parameter_groups(row.generation) for row in reader.generations()]
        names = [one.name for one in reader.training_gradients(0, 0)]
        assert reader.findings() == []
    assert [*found] == ["encoder", "model"]
    assert [len(steps) for steps in found.values()] == [3, 2]
    assert {*names} == {f"{a}.{b}" for a in ("encoder", "decoder") for b in ("weight", "bias")}
    assert groups[1] == ("layer",)
    assert all(step.n_backward > 1 for step in found["encoder"])


PRINTING = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    print("step", number, flush=True)
"""


def test_a_printed_line_belongs_to_the_step_that_ended_before_it(tmp_path: Path) -> None:
    _, out = recorded(tmp_path, PRINTING)
    with open_trace(out) as reader:
        lines = [row.output for row in reader.output() if row.output.text.startswith("step")]
    # A line is timed when the process that reads it has it, so it may seem to be of a later step.
    for printed in lines:
        assert printed.generation == 0
        assert int(printed.text.split()[1]) <= (printed.step or 0) <= 2


LOADED = """
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    model.eval()
    with torch.no_grad():
        F.mse_loss(model(data.tensors[0]), data.tensors[1])
    model.train()
raise SystemExit(0)
"""


def test_loaders_scalers_and_evaluations_are_recognised(tmp_path: Path) -> None:
    _, out = recorded(tmp_path, LOADED)
    with open_trace(out) as reader:
        (steps,) = trainings(reader).values()
        events = [row.event for row in reader.events() if row.event.kind == "evaluation"]
        run = reader.run()
    assert len(steps) == 8
    assert all(step.data_ms is not None and step.data_ms > 0 for step in steps)
    assert all(step.scale == 128.0 and step.loss < 5 for step in steps)
    assert [event.step for event in events] == [4, 8]  # before step 4, and at the end
    assert all(event.data["n_in_evaluation_mode"] == 1 for event in events)
    assert run["training"]["total_steps"] == 8


HUGGING_FACE = """
import sys, tempfile
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, eos_token_id=None)
model = LlamaForCausalLM(config)
rows = [{"input_ids": torch.arange(12), "labels": torch.arange(12)} for _ in range(16)]
arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=3, report_to=[],
    per_device_train_batch_size=2, gradient_accumulation_steps=2, eval_strategy="steps",
    eval_steps=2, disable_tqdm=True, use_cpu=True, save_strategy="no")
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4]).train()
model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
"""


def test_a_trainer_is_a_training_and_a_generation_after_it_is_one(tmp_path: Path) -> None:
    _, out = recorded(tmp_path, HUGGING_FACE)
    with open_trace(out) as reader:
        training, generation = reader.generations()
        steps = [*reader.training_steps(training.generation).values()]
        assert reader.n_steps(generation.generation) == 4
        events = [row.event for row in reader.events() if row.event.kind == "evaluation"]
        assert not [one for one in reader.findings() if one.id.startswith("training.")]
    assert "training" in training.declared
    assert "training" not in generation.declared
    assert [step.n_backward for step in steps] == [2, 2, 2]
    assert all(step.loss_source == "output" for step in steps)
    assert [event.data["n"] for event in events] == [1, 1]  # after step 2, and at the end


LONGER = """
from transformers import LlamaConfig, LlamaForCausalLM
class Adding(LlamaForCausalLM):
    def generate(self, *args, max_new_tokens=20, **kwargs):
        return super().generate(*args, max_new_tokens=max_new_tokens + 4, **kwargs)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, eos_token_id=None)
prompt = torch.tensor([[1, 2, 3]])
for kind in (LlamaForCausalLM, Adding):
    kind(config).eval().generate(prompt, max_new_tokens=3, do_sample=False)
"""


def test_a_generate_that_returns_more_than_asked_is_named(tmp_path: Path) -> None:
    _, out = recorded(tmp_path, LONGER)
    with open_trace(out) as reader:
        (one,) = [one for one in reader.findings() if one.id == "text.more-than-asked"]
    assert one.sentence == "generate returned 7 new tokens, and was asked for at most 3."
    assert one.generation == 1


COPIED = """
import copy
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = copy.deepcopy(model)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def test_an_optimizer_of_a_model_that_a_copy_replaced_is_named(tmp_path: Path) -> None:
    _, out = recorded(tmp_path, COPIED)
    with open_trace(out) as reader:
        (one,) = [one for one in reader.findings() if one.id == "training.optimizer-parameters"]
    assert one.sentence.startswith("SGD holds 4 parameters that the model no longer has")


def test_an_optimizer_that_never_steps_is_no_training(tmp_path: Path) -> None:
    optimizer = "torch.optim.SGD(model.parameters(), lr=1)"
    script = f"model = nn.Linear(2, 1)\n{optimizer}\nmodel(torch.ones(1, 2))\n"
    _, out = recorded(tmp_path, script)
    with open_trace(out) as reader:
        texts = [row.event.text for row in reader.events() if row.event.kind == "not-recorded"]
    assert [text[:43] for text in texts] == ["No step of a torch optimizer was seen. To r"]


OUTLIER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x
net = Net()
others = [p for n, p in net.named_parameters() if n != "layers.3.weight"]
optimizer = torch.optim.AdamW([
    {"params": others, "lr": 1e-5},
    {"params": [net.layers[3].weight], "lr": RATE},
], weight_decay=0.0)
for _ in range(3):
    optimizer.zero_grad()
    F.mse_loss(net(torch.randn(8, 16)), torch.zeros(8, 16)).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("rate", ["1e-2", "0.0", "1e-5"])
def test_a_layer_whose_rate_is_out_of_proportion_is_named_in_the_first_step(
    tmp_path: Path, rate: str
) -> None:
    _, out = recorded(tmp_path, OUTLIER.replace("RATE", rate))
    with open_trace(out) as reader:
        found = [one for one in reader.findings() if one.id == "training.update-outlier"]
    assert [one.step for one in found] == ([] if rate == "1e-5" else [0])
    assert all("layers.3.weight" in one.sentence for one in found)


WRAPPED = """
class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 2)
    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))
    def training_step(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)
class Trainer:
    def fit(self, module, data):
        optimizer, scheduler = module.configure_optimizers()
        for epoch in range(2):
            module.train()
            for batch in data:
                def closure():
                    optimizer.zero_grad()
                    loss = module.training_step(batch)
                    loss.backward()
                    return loss
                optimizer.step(closure)
            scheduler.step()
            module.eval()
            with torch.no_grad():
                for batch in data:
                    module.training_step(batch)
digits = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
Trainer().fit(Lit(), torch.utils.data.DataLoader(digits, batch_size=16, shuffle=True))
"""


def test_a_trainer_that_steps_with_closures_is_recorded_with_its_evaluations(
    tmp_path: Path,
) -> None:
    _, out = recorded(tmp_path, WRAPPED)
    with open_trace(out) as reader:
        ((name, steps),) = trainings(reader).items()
        passes = [one.event for one in reader.events() if one.event.kind == "evaluation"]
        assert reader.findings() == []
    assert (name, len(steps)) == ("Lit", 8)
    assert all(0.3 < step.loss < 1.5 and step.n_backward == 1 for step in steps)
    assert [(one.step, one.data["n"]) for one in passes] == [(4, 4), (8, 4)]
    assert all(one.data["loss"] > 0 for one in passes)


WORKERS = """
from torch.utils.data import DataLoader, Dataset
class Random(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.randn(8)
def begin(worker):
    if {is_same}:
        torch.manual_seed(1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for x in DataLoader(Random(), batch_size=8, num_workers=2, worker_init_fn=begin):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("is_same", [True, False])
def test_workers_that_draw_the_same_numbers_are_named(tmp_path: Path, is_same: bool) -> None:
    _, out = recorded(tmp_path, WORKERS.format(is_same=is_same))
    with open_trace(out) as reader:
        found = [one for one in reader.findings() if one.id == "training.repeated-batch"]
    assert [(one.severity.value, one.step) for one in found] == [("warning", 1)] * is_same
    assert all("its 2 workers may draw the same random numbers" in one.sentence for one in found)


ACCELERATED = """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for x in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_loop_of_accelerate_is_recorded_with_its_accumulation(tmp_path: Path) -> None:
    _, out = recorded(tmp_path, ACCELERATED)
    with open_trace(out) as reader:
        ((_, steps),) = trainings(reader).items()
        assert [one for one in reader.findings() if one.severity.value != "note"] == []
    assert [one.n_backward for one in steps] == [2] * 4
    assert all(one.max_norm == 1.0 for one in steps)
