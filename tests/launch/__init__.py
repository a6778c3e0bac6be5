"""Files of examples/launch under the tools that they are for."""
