"""`laconic train`: any transformers causal LM, from one configuration file, under laconic or a PyTorch baseline."""
