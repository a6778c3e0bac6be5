"""The strategies of DeepSpeed and of torchft: [Note: Registered strategies] in laconic/registry.py."""
