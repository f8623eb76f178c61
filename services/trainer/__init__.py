"""Turns batches into versions."""
