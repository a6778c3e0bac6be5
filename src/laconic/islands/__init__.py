"""Islands of machines that run on their own and agree rarely."""
