"""A trainer for DFlash drafters: conversations in, a drafter checkpoint out."""

__version__ = "0.1.0"
