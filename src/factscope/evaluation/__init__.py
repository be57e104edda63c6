"""Score edits: likelihoods and generated texts of edited and unedited models (paper §3.2, §3.3)."""
