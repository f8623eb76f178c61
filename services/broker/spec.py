"""The broker in the table of actors. It is started by `pipeline.run.serve`, which also ends the run."""

from penstock.services.runtime.registry import ActorSpec

SPEC = ActorSpec(kind="broker", make="", grace_s=640.0, single=True)
