"""Grafts BHyT into RMSNorm Llama checkpoints, and proves what was lost. `python -m conversion --help`."""
