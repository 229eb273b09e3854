"""Measuring: likelihoods, metrics of samples, language models that score text, exact laws."""
