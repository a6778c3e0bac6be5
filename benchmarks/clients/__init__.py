"""laconic inside the trainers that people already use, beside the same trainers with DDP."""
