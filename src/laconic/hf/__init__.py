"""Everything that uses transformers and peft: models, weights, adapters, tokenizers and export."""
