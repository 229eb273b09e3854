"""Measuring: for now the exactness of samplers on the toys."""
