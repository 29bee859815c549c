"""What is measured: the protocol of a subject, and the one that spins."""
