"""Language models of any family: load them, read and replace activations, generate text."""
