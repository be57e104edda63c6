"""Did the edit work? (paper §3.2)"""
