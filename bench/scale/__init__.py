"""How long it takes to make large data sets ready, and how much memory."""
