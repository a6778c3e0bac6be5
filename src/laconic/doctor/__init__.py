"""`laconic doctor`: what a cluster is, whether it is well, and what to set.

Every rank reads facts about itself (`facts`), all ranks measure together (`probes`), and pure functions judge what was
read and measured (`judgements`).
"""
