"""A trainer for DFlash drafters: conversations in, a drafter checkpoint out."""

from steptime.cuda_settings import prefer_expandable_segments

__version__ = "0.1.0"

# Whoever trains imports this package, and CUDA's allocator reads its settings at its first use: `dflash`,
# `python -m bench`, its worker processes and notebooks all measure the allocator that trains.
prefer_expandable_segments()
