"""One file for each stage of the check; `bench.gpu_check.registry` lists them."""
