"""Benchmarks that anyone can repeat: `make bench`, or one by name: `python -m benchmarks overhead`."""
