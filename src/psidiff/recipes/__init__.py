"""Recipes: one YAML file for each experiment, its measured result in a comment."""
