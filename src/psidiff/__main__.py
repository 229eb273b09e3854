"""`python -m psidiff` is `psidiff`."""

from .cli.main import main

main()
