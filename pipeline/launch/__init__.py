"""The same run on clusters that exist: Slurm, Ray, Kubernetes."""
