"""The engine: units, buckets, gather, cache and reduce."""
