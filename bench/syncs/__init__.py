"""What knows the trainer in counting: its device and its sources as ways, the planted faults, the proof."""
