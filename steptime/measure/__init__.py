"""Measuring one subject: arms, rounds and sizes (`plan`), and what takes the segments (`runner`)."""
