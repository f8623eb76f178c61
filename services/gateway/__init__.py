"""The gateway: agents outside the pipeline roll out through it, and are trained on the tokens that they were served."""
