"""The ranks beside rank 0: they train the same steps on their share, and hand over their part of every version."""

from __future__ import annotations

import threading

from penstock.services.learning import checkpoint
from penstock.services.learning.shift import OF_SHIFTS
from penstock.services.runtime.actor import ActorContext
from penstock.services.trainer.canary_scores import score
from penstock.services.trainer.held_out import HeldOut
from penstock.services.trainer.rank_setup import TrainerSettings, make_exporter, make_rank, train
from penstock.services.weights.queues import Event, current_queue
from penstock.services.weights.sender.rank_sender import RankSender


class WorkerRank:
    """Rank 1 and above. `run` returns when rank 0 says so."""

    def __init__(self, context: ActorContext, settings: TrainerSettings) -> None:
        self._settings = settings
        rank = make_rank(context, settings)
        self._world, self._learner, self._shift = rank.world, rank.learner, rank.shift
        kept = settings.trainer.checkpoint
        self._saver = checkpoint.Saver(self._learner, rank.tokenizer, settings.checkpoints, kept)
        self._sender = RankSender(make_exporter(self._learner, settings), settings.weights.host, settings.colocated)
        self._read = threading.Event()
        self._read.set()
        self._canary = settings.canary(self._learner, rank.tokenizer)
        self._sending: threading.Thread | None = None
        self._error: BaseException | None = None
        self._held_out: HeldOut | None = None

    @property
    def version(self) -> int:
        """That this rank's part of the model is of."""
        return self._learner.version

    def run(self) -> None:
        """Does as rank 0 orders."""
        while True:
            what, batch = self._world.obey()
            if what == "train":
                assert batch
                train(self._learner, batch, self._settings, self._until_read)
            if what in ("train", "publish"):
                if self._canary:
                    score(self._learner, self._canary)
                self._until_sent()
                self._read.clear()
                trained = current_queue(self._learner.device).mark()
                self._sending = threading.Thread(target=self._send, args=(trained,), name="source", daemon=True)
                self._sending.start()
            elif what == "rows":
                self._held_out = self._settings.held_out_rows(self._world.share(), self._learner.model.config)
            elif what == "measure":
                assert self._held_out
                self._held_out.measure(self._learner)
            elif what == "save":
                self._saver.begin()
            elif what in OF_SHIFTS:
                assert self._shift
                self._until_sent()
                self._shift.obey(what, self._learner, self._sender)
            elif what == "end":
                self._until_sent()
                self._saver.close()
                self._world.close()
                return

    def _send(self, trained: Event) -> None:
        try:
            self._sender.follow(trained, self._read.set)
        except BaseException as error:
            self._error = error
        finally:
            self._read.set()

    def _until_read(self) -> None:
        """Until this rank's part of the last version was read: the model may change."""
        self._read.wait()
        if self._error:
            raise self._error

    def _until_sent(self) -> None:
        """Until this rank's part of the last version is handed over."""
        if self._sending:
            self._sending.join()
        if self._error:
            raise self._error
