"""The places of a pipeline, which are played together: each on a machine of its own, all on one clock.

[Note: When a message begins]
A message begins when its sender has sent it and its receiver has asked for it: Gloo says so to the other side, and
NCCL's kernels meet. Then it occupies the wire of the sender's node, in the direction in which it goes, behind what that
node sends already. Both sides' waits end when it has arrived. So a bubble is the time in which a place waits for a
message that has not begun, and nobody has to say how long it is. A node's wire carries as much in each direction at the
same time. That two neighbours send to one node at once is not counted.

[Note: Order of clocks]
The place whose clock is behind goes on, until it begins or awaits a transfer. So places begin their transfers in the
order of the clock, but for what a place does between two transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laconic.plan.machine import Job, PlanLane, Reading, Simulator
from laconic.plan.phantom import Together
from laconic.plan.playing import Awaited, Player
from laconic.plan.rehearsal import Rehearsal
from laconic.rehearse import DeadlockError
from laconic.rehearse.tape import MessageName, Transfer


class Meetings:
    """Where the messages of the places meet: [Note: When a message begins]."""

    def __init__(self, machines: Sequence[Simulator]) -> None:
        """Serve these machines, in the order of the places."""
        self._machines = machines
        self._sent: dict[MessageName, tuple[float, Transfer, str]] = {}
        """When each was sent that nobody has asked for, and what it is."""
        self._asked: dict[MessageName, float] = {}
        """When somebody has asked for each that was not sent."""
        self._jobs: dict[MessageName, Job | None] = {}
        """Those that have begun."""
        self._here: dict[Together, list[float]] = {}
        """When places have come to each meeting of all."""

    def send(self, taped: Transfer, name: str) -> None:
        """A place sends a message, now."""
        message = taped.message
        assert message is not None
        self._sent[message] = self._machines[message.sender].now_s, taped, name
        self._begin(message)

    def ask(self, message: MessageName) -> None:
        """A place asks for a message, now."""
        self._asked[message] = self._machines[message.receiver].now_s
        self._begin(message)

    def _begin(self, message: MessageName) -> None:
        if message not in self._sent or message not in self._asked:
            return
        (since, taped, name), asked_s = self._sent.pop(message), self._asked.pop(message)
        sender, receiver = self._machines[message.sender], self._machines[message.receiver]
        purpose: Any = taped.purpose
        self._jobs[message] = sender.send_message(taped.route, name, purpose, since=since, ready_s=asked_s)
        receiver.lose_to_message(taped.route, name)

    def come(self, place: int, together: Together) -> None:
        """A place waits for all others, now."""
        self._here.setdefault(together, []).append(self._machines[place].now_s)

    def has_begun(self, awaited: Awaited) -> bool:
        """Whether it is known when a message arrives, or when all places are together."""
        if isinstance(awaited, Together):
            return len(self._here.get(awaited, ())) == len(self._machines)
        return awaited is None or awaited in self._jobs

    def job(self, awaited: MessageName | Together) -> Job | None:
        """The job that ends when the message has arrived."""
        if isinstance(awaited, Together):
            return Job(PlanLane.STAGES, max(self._here[awaited]))
        return self._jobs[awaited]


class _PlaceMail:
    """The `Mail` of one place."""

    def __init__(self, meetings: Meetings, place: int) -> None:
        self._meetings, self._place = meetings, place
        self._met: set[Together] = set()

    def send(self, taped: Transfer, name: str) -> bool:
        self._meetings.send(taped, name)
        return True

    def ask(self, taped: Transfer) -> None:
        assert taped.message is not None
        self._meetings.ask(taped.message)

    def has_begun(self, awaited: Awaited) -> bool:
        if isinstance(awaited, Together) and awaited not in self._met:
            self._met.add(awaited)
            self._meetings.come(self._place, awaited)
        return self._meetings.has_begun(awaited)

    def job(self, awaited: MessageName | Together) -> Job | None:
        return self._meetings.job(awaited)


def _words(awaited: Awaited) -> str:
    if isinstance(awaited, MessageName):
        return f"message {awaited.number} from place {awaited.sender} to place {awaited.receiver}"
    return "all others"


def play_together(machines: Sequence[Simulator], rehearsals: Sequence[Rehearsal]) -> list[Reading]:
    """Play the rehearsals of all places of a pipeline, in their order, and read each one's last step.

    Each reading begins and ends on its own place's clock: [Note: Order of clocks].

    Raises:
        DeadlockError: places wait for messages that nobody sends.
    """
    meetings = Meetings(machines)
    players = [
        Player(machine, rehearsal, _PlaceMail(meetings, place))
        for place, (machine, rehearsal) in enumerate(zip(machines, rehearsals, strict=True))
    ]
    playing = {place: player.play() for place, player in enumerate(players)}
    awaited: dict[int, Awaited] = dict.fromkeys(playing)
    readings: dict[int, Reading] = {}
    while playing:
        able = [place for place in playing if meetings.has_begun(awaited[place])]
        if not able:
            waits = (f"place {place} waits for {_words(awaited[place])}" for place in playing)
            raise DeadlockError(f"no place of the pipeline can go on: {'; '.join(waits)}")
        place = min(able, key=lambda each: players[each].now_s)
        try:
            awaited[place] = next(playing[place])
        except StopIteration as end:
            readings[place] = end.value[0]
            del playing[place]
    return [readings[place] for place in range(len(players))]
