"""What measuring a training step needs from torch alone, and no trainer.

- `errors`: the exception for a user's mistake;
- `commandline`: typer command lines that make every mistake such an exception (needs typer, and no torch);
- `cuda_settings`: how CUDA's allocator is asked to start, and determinism where bits are compared;
- `host_memory`: which CPU tensors stand for host memory where the "GPUs" are the CPU;
- `nvml`: the driver's library, and which of its GPUs are those that CUDA calls 0, 1, ... (needs nvidia-ml-py
  where it is asked);
- `syncs`: CUDA's rules (what waits, what copies), the scopes of the workers, and what counts in them.

`dflash` (the trainer) and `bench` (the harness) import this package; it imports neither.
"""
