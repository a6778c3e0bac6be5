"""The strategies of laconic and of PyTorch: [Note: Registered strategies] in laconic/registry.py."""
