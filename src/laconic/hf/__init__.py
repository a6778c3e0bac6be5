"""What knows transformers and peft: models, weights, adapters, tokenizers and export."""
