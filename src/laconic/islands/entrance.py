"""The wait of an island that comes, until it is a member."""

import time
import warnings
from typing import Any

from laconic.errors import JobError
from laconic.islands.ledger import SILENCE_S, Ledger
from laconic.islands.membership import Membership

_POLL_S = 0.2
_NOTICE_S = 15.0  # until a line says that this island waits for others


class Entrance:
    """Queues up for an island. For its first rank."""

    def __init__(self, ledger: Ledger, policy: Membership, terms: dict[str, Any], rounds: int) -> None:
        """Take the terms that all islands must share, and the rounds that this island's state has."""
        self._ledger, self._policy, self._terms, self._rounds = ledger, policy, terms, rounds
        self._begun, self._has_warned = time.monotonic(), False
        self._number: int | None = None
        self._beats, self._heard_at = -1, 0.0

    def wait(self, patience_s: float) -> list[int] | None:
        """Wait for `patience_s`. Returns the generation and the number of this island once it is a member, else None.

        Raises:
            JobError: the other islands have other terms, or none of them has come within `start_timeout_s`.
        """
        if self._number is None:
            if self._is_founded() and self._ledger.has_ended():
                self._ledger.begin_generation()
            self._queue_up()
        assert self._number is not None
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self._ledger.welcome(self._number) is not None:
                return [self._ledger.generation, self._number]
            self._look_around()
            time.sleep(_POLL_S)
        return None

    def _queue_up(self) -> None:
        self._ledger.agree_on(self._terms)
        self._number = self._ledger.come(self._rounds)
        self._beats, self._heard_at = -1, time.monotonic()
        if self._number == self._policy.islands - 1:
            self._ledger.found(self._policy.islands)

    def _look_around(self) -> None:
        """Answer calls; leave a generation that has died out; say that this island waits, or give up."""
        assert self._number is not None
        self._ledger.look_for_end()
        self._ledger.answer(self._number)
        beats, now = self._ledger.num_beats(), time.monotonic()
        if beats != self._beats or not self._is_founded():
            self._beats, self._heard_at = beats, now
        if now - self._heard_at > SILENCE_S:  # [Note: A run that has ended]
            self._ledger.begin_generation()
            self._queue_up()
        waited_s = now - self._begun
        if waited_s > self._policy.start_timeout_s:
            raise JobError(f"{self._missing()} after {waited_s:.0f} s; start the others, or set `islands` lower")
        if waited_s > _NOTICE_S and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{self._missing()}; this island waits", stacklevel=2)

    def _is_founded(self) -> bool:
        return self._ledger.num_come() >= self._policy.islands

    def _missing(self) -> str:
        come, islands = self._ledger.num_come(), self._policy.islands
        if come < islands:
            return f"{come} of {islands} islands have come to {self._policy.rendezvous}"
        return f"the islands at {self._policy.rendezvous} have not ended a round since this one came"
