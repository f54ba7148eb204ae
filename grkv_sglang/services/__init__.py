"""Applications on top of a server with the plugin: they talk to it over HTTP and import nothing of SGLang."""
