"""Tasks of several turns: what answers the policy, until it says that the task is done."""
