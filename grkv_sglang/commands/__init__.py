"""What the `grkv` commands do, one module each; `cli.py` only reads their arguments."""
