"""Models that ship: what the recipes of these names gave."""
