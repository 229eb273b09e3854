"""Data: for now the toys, whose distributions are known exactly."""
