"""A chat for many users whose histories are compressed as they grow: `grkv chat`."""
