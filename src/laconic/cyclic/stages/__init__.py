"""Cutting a model into stages, and measuring what they save for backward."""
