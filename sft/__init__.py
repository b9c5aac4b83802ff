"""Fine-tunes BHyT and plain Llama checkpoints on conversations: python -m sft."""
