"""Sweeps: many trials of one configuration, and what they say about the learning rate."""
