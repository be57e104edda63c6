"""Numbers → figures, tables and pages. Reads records, never a model. No torch."""
