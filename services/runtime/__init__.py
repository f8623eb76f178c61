"""What every actor runs on: its life at the broker, health, logs, settings, errors. Imports no torch."""
