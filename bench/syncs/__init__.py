"""Counting host syncs and device work: the ways (`ways`), their difference, the child process that counts,
the proof.

with count_syncs() as syncs:       # around any PyTorch loop
    ...
"""
