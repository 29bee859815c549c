"""Host syncs: what waits on a GPU (`rules`), seen by two modes (`modes`) and by wrapped entry points
(`calls`) inside a worker's scope (`scopes`), and counted (`counting`). Works on the CPU, where the device
boundary is kept by `boundary`."""
