"""The machine that is measured: what it is and whether it is fit, its GPUs under load, its cores, its
commit."""
