"""Which rank holds which elements of which tensor: arithmetic on shapes that knows nothing of torch.distributed."""
