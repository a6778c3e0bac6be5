"""Steps of published models on nodes of eight H100, simulated: laconic's own tape and torch's, without a GPU."""
