"""A language model one can look into, whatever its family calls its parts."""
