"""Local steps: islands of machines that train on their own and sync rarely."""
