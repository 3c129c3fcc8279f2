"""What fits a card: weights, KV cache and scratch, and the largest batch."""
