"""Code that uses transformers and peft: weights in their folders, adapters, causal language models in stages."""
