"""Programs that run as one rank of a cluster that is not there, and what a run of one shows: docs/races.md."""
