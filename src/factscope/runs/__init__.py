"""Runs: the same work over many facts, into a folder from which an interrupted run resumes."""
