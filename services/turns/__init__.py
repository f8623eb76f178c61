"""What rollouts and gateways share of tasks of several turns: prompts to tokens, turns to trajectories."""
