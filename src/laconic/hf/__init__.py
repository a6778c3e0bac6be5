"""What knows transformers and peft: weights in their folders, adapters, and causal language models in stages."""
