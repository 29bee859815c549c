"""Counting host syncs and device work: the ways (`ways`), their difference, the child process that counts.

with count_syncs() as syncs:       # around any PyTorch loop
    ...
"""
