"""One simulated CUDA device for a whole program, whose memory is the CPU's: `simulated_cuda`."""

from steptime.simulate.program.cuda import simulated_cuda

__all__ = ["simulated_cuda"]
