"""What strangers published, as jobs and clusters of the planner: one TOML file for each source (see `sources`)."""
