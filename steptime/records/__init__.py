"""What is measured and what is left behind: the records (`types`), the receipt, and their strict reader."""
