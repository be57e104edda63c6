"""The same work many times over, into a folder that survives a kill."""
