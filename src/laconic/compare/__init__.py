"""One training job under several strategies, side by side in the lab, for `laconic compare` and for benchmarks."""
