"""Planted faults, the programs of known truth, and the pages that say which way of counting finds which."""
