"""The report of a comparison: what the records of its cells say, as table, figures and page."""
