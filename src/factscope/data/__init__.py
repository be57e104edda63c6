"""Facts, cases and reference texts: data sets by name, and readers of their files."""
