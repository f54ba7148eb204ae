"""What to compress, when, and how far. Decides on token counts and names; holds no tensors."""
