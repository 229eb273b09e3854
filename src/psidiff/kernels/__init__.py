"""Row operations: random bits from counters, races, truncation by threshold search."""
