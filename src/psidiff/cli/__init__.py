"""The command line: one verb each."""
