"""Bridges to what others have: released checkpoints, diffusers, transformers, the harness."""
