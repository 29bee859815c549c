"""What the harness can measure: the protocol, a file or folder for each subject, and their registry."""
