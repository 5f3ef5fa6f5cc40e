"""A small network in training, watched; with --rate 30 it goes wrong."""

from __future__ import annotations

import argparse

import torch
from torch import nn

import flexinspect

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.05)
parser.add_argument("--out", default=None)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.rate)
batches = torch.randn(20, 32, 8)

with flexinspect.watch_training(model, optimizer, out=args.out) as trace:
    for batch in trace.batches(batches):
        loss = ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trace.step(loss=loss)

for finding in trace.findings():
    print(f"{finding.severity}: {finding.sentence}")
