"""One file for each command that any trainer can use."""
