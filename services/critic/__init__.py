"""Values for PPO: a model that learns, step by step, what rewards are still to come."""
