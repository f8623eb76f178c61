"""What makes a run of the actors: command line, config, supervision, live view, report."""
