"""Measurements that other people published, as jobs and clusters: one TOML file for each source (see `sources`)."""
