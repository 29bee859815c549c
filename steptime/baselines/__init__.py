"""Stored figures: one reviewed JSON file per machine and config, recorded by hand, compared by everyone."""
