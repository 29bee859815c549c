"""Speculative decoding taken apart: what the target remembers, what the drafter remembers, how a token is
chosen."""
