"""Exact attention for CuPy arrays, and the commands that explain its rounding."""
