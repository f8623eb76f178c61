"""A run: its folder, its processes, its end."""
