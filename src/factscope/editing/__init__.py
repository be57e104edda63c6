"""Writing facts into weights (paper §3)."""
