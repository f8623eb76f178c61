"""Who may say what to the broker."""

from __future__ import annotations

from penstock.protocols import messages as m

LEARNER = "learner"
"""In the place of a kind: every kind that trains on the ledger's steps."""
GENERATOR = "generator"
"""In the place of a kind: who makes groups, rollouts or, where there are agents, gateways."""
SENDERS: dict[type[m.Message], str] = {
    m.Finished: GENERATOR,
    m.Failed: GENERATOR,
    m.TurnRequest: "gateway",
    m.Note: "gateway",
    m.GiveBack: "gateway",
    m.Generated: "rollout",
    m.Loaded: "rollout",
    m.LoadFailed: "rollout",
    m.Reach: "rollout",
    m.LedgerTail: "trainer",
    m.Take: LEARNER,
    m.HeldOutRequest: "trainer",
    m.EvalLoss: "trainer",
    m.StepColumn: LEARNER,
    m.Learned: LEARNER,
    m.Commit: "trainer",
    m.Checkpointed: LEARNER,
    m.Invite: "trainer",
    m.Propose: "trainer",
    m.CommitVersion: "trainer",
    m.Published: "trainer",
    m.StopRun: "observer",
}
"""Who alone may say what; anything else is for every member. A column is for the kind that the config says."""
