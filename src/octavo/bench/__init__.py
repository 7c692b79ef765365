"""Benchmarks, and the named problems that they share with the tests."""
