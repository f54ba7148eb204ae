"""Device kernels, each beside its torch reference."""
