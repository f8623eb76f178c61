"""Environments as services: processes that lease the run's tasks from its gateways, and play them with the policy."""
