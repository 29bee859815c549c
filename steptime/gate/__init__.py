"""Is this commit slower than that one? Two trees, a process of each taking turns, and the verdict of their
segments."""
