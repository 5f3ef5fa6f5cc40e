"""transformers' own compiled flex on a CPU, with a left-padded batch: the C++ does not build."""

import kit
import torch

model = kit.tiny("flex_attention")
# With 8 keys, torch 2.13's compiled prefill reads memory that nothing wrote, with NaN at times.
input_ids = torch.cat([kit.ids(16), kit.ids(16, seed=2)])
padding = torch.tensor([[0] * 3 + [1] * 13, [1] * 16])
input_ids[0, :3] = 0
print("entering compiled flex", flush=True)
try:
    model.generate(input_ids, attention_mask=padding, max_new_tokens=3, do_sample=False)
    print("it ran")
except Exception as error:
    errors = [line for line in str(error).splitlines() if "error" in line.lower()]
    print(type(error).__name__, "| about cur_kvSplitSize:", "cur_kvSplitSize" in "".join(errors))
