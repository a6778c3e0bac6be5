"""`laconic train` trains a transformers causal LM from one configuration file, by laconic or a PyTorch baseline."""
