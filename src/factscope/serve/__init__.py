"""The page: locate, edit and compare in a browser, for several people at once."""
