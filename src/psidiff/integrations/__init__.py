"""Bridges to what others have: for now the released checkpoints."""
