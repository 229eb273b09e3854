"""Recipes, data, comparisons and reports: what the commands do, without a terminal."""
