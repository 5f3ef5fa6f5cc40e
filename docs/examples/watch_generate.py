"""`model.generate`, unchanged, under watch: what ran, compared with the mask that was meant.

Run it with: python docs/examples/watch_generate.py
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import flexinspect

# The small model that ships with the package; any folder or name from the hub does as well.
folder = Path(flexinspect.__file__).parent / "data" / "demo"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).eval()

questions = ["What is the capital of Kenya?", "Which city is the capital of Kenya?"]
inputs = tokenizer("\n".join([*questions, "Answer:"]), return_tensors="pt")

with flexinspect.watch(model, tokenizer, segments=questions, mask="segment-isolation") as trace:
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)

print(tokenizer.decode(output[0]))
print(trace)
