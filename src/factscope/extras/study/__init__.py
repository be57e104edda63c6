"""A blind comparison of generated texts by human raters."""
