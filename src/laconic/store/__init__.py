"""Durable folders: written whole, checked by digest, committed by one rename. Of the standard library and torch."""
