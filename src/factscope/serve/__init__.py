"""The server: trace, edit and compare in a browser, for several users at once."""
