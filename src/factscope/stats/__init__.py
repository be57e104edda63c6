"""Second moments C = E[k kᵀ] of the keys of an MLP's output weight."""
