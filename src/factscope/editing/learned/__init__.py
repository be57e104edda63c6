"""Editors that are trained: networks that turn the gradient of a fact into an edit."""
