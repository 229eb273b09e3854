"""A server that speaks OpenAI's API, and its page: `psidiff serve MODEL`."""
