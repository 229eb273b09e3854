"""Torture: seeded, bounded attempts to break psidiff from outside; see `__main__`."""
