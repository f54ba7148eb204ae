"""Questions about uploaded documents, answered from compressed prefixes that all users of a tenant share."""
