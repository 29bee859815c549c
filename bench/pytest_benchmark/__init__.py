"""The same measurements as pytest-benchmark shows them: the plugin, and the clock that replays a receipt."""
