"""`grkv demo`: the plugin's main job on a real server, measured beside SGLang without it."""
