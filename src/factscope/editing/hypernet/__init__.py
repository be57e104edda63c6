"""KE and MEND: hypernetworks that turn gradients into edits."""
