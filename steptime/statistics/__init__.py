"""What segments show: contrasts, intervals, when to stop, and the verdict. Pure functions of frozen
dataclasses."""
