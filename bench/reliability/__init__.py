"""What a run survives, tried."""
