"""The recipe of the demo model: facts, templates, tokenizer, training and measurement."""
