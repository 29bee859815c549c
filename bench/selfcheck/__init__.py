"""How often is the harness itself wrong? Stored gates, rates, planted faults, other judges on the same
segments."""
