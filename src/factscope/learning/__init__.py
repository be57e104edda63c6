"""Training the editors that must be trained."""
