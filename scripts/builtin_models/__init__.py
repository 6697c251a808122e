"""How the built-in models are made: `data` (corpus, tokenizer), `model` (a Llama to train), `training`, `report`."""
