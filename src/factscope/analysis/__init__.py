"""Records → numbers: average effects with their intervals. No torch."""
