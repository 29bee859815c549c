"""Every reader against input of every shape: one clear line or a right result, never a traceback."""
