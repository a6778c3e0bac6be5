"""The colours of strategies in pictures: baselines grey, blue and green, laconic's own strategies orange and brown.

Lightness differs, too, for colour-blind readers.
"""

COLOURS = {
    "fsdp2": "#4d4d4d", "fsdp2-gloo": "#262626", "fsdp2-hpz": "#7f7f7f", "hsdp": "#4a78a8", "ddp": "#a3c1da",
    "deepspeed": "#2f7f6f", "deepspeed-hpz": "#8cc5b8", "zero++": "#5e4b8b", "none": "#f2c879", "host": "#d95f02",
    "device": "#8c3b00", "8bit": "#b8860b", "4bit": "#7a5c00", "local": "#c51b7d", "local-fp32": "#8e0152",
    "torchft-diloco": "#4d9221",
}  # fmt: skip
"""On a white background."""

DARK = {
    **COLOURS, "fsdp2": "#b0b0b0", "fsdp2-gloo": "#e0e0e0", "fsdp2-hpz": "#8a8a8a", "hsdp": "#6f9fd0",
    "deepspeed": "#45a896", "zero++": "#9a83d6", "device": "#b85c1f", "4bit": "#a88418", "local-fp32": "#d4569b",
    "torchft-diloco": "#74b93f",
}  # fmt: skip
"""On a dark background: the darkest colours are lighter."""
