"""The least bits of gradients on the wire at which losses stay those of exact gradients."""
