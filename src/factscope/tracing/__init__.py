"""Causal tracing: which hidden states carry a fact (paper §2)."""
