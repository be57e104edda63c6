"""Facts and text, from files and from the package itself."""
