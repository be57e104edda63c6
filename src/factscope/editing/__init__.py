"""Model editing: write facts into a model's weights (paper §3)."""
