"""Trainers fed by capture servers, with a fake clock.

In: lengths of samples, and the assumptions of `World`. Out: what a run of some steps would look like: data wait,
buffers, link use, the first bottleneck. Order, global steps, split over ranks, capture groups and the index of records
are headrace's own code; only time is made up. Windows are captured whole, by the server that a hash of the window names
among the living; a server starts a window when the trainers' step ends less than `ahead_tokens` before it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.config import OrderConfig
from headrace.order import capture_groups, split_over_ranks, windows
from headrace.store.index import RecordIndex
from headrace.store.journal import JOURNAL_DTYPE
from headrace.train.batches import Plan

Ints = npt.NDArray[np.int64]
BUSY = 0.75  # a resource used less than this is not the limit


@dataclass(frozen=True)
class World:
    """What is assumed. Rates in tokens/s, links in bytes/s each way; scale.py says where numbers come from."""

    num_ranks: int
    num_servers: int
    rank_rate: float
    server_rate: float
    bytes_per_token: float
    server_link: float
    node_link: float
    step_tokens: int
    ranks_per_node: int = 8
    window_samples: int = 128
    group_tokens: int = 16384
    ahead_tokens: float = 2.0  # in global steps
    gradient_s: float = 0.0  # adding up gradients, each step
    record_s: float = 0.0  # a server's fixed time for each record
    num_dead: int = 0
    dead_at: float = 0.5  # share of the steps after which they die
    notice_s: float = 15.0


@dataclass
class Outcome:
    """What came of it, after the first quarter of the steps, in which buffers fill."""

    wait_share: float
    step_s: float
    node_buffer: float
    server_buffer: float
    use: dict[str, float] = field(default_factory=dict)  # share of the time busy, before any server died
    wait_share_after: float = 0.0  # after servers died

    @property
    def bottleneck(self) -> str:
        """What to buy first; nothing while the trainers wait less than a twentieth of their time.

        Where they wait and nothing is busy, windows came to the servers unevenly within the distance ahead.
        """
        if self.wait_share < 0.05:
            return "trainers"
        most = max(self.use, key=lambda name: self.use[name])
        return most if self.use[most] > BUSY else "distance"


@dataclass
class _Record:
    position: int
    window: int
    server: int
    captured: float
    arrival: float
    num_bytes: float
    node: int


class Simulation:
    """One epoch's first steps."""

    def __init__(self, world: World, lengths: Ints, owner: Callable[[int, int], int] | None = None) -> None:
        """Args: owner: (position, its rank) -> server; None: by a hash of the window."""
        self.world, self.lengths, self._owner = world, lengths, owner
        order = OrderConfig(window_samples=world.window_samples)
        self.plan = Plan(lengths, np.ones(len(lengths), np.bool_), order, world.step_tokens, 1)
        self.rows = self.plan.rows(0)
        self.steps = self.plan.steps(0)
        self.index = RecordIndex(_journal(lengths, world.bytes_per_token))
        groups: dict[int, list[tuple[int, ...]]] = {}
        for group in capture_groups(lengths, world.window_samples, world.group_tokens):
            groups.setdefault(group.window, []).append(group.rows)
        self.groups = groups
        of_row = np.empty(len(lengths), np.int64)
        for number, window in enumerate(windows(len(lengths), world.window_samples)):
            of_row[window.start : window.stop] = number
        self.window_at = of_row[self.rows]
        self.place = {int(row): place for place, row in enumerate(self.rows)}
        self.alive = list(range(world.num_servers))
        self.captured_until = [0.0] * world.num_servers
        self.sent_until = [0.0] * world.num_servers
        self.received_until = [0.0] * -(-world.num_ranks // world.ranks_per_node)
        self.busy = {"capture": 0.0, "server link": 0.0, "node link": 0.0}
        self.rank_at: dict[int, int] = {}
        self.records: dict[int, _Record] = {}
        self.issued = 0  # positions whose windows were asked for

    def run(self, num_steps: int) -> Outcome:
        """Go through the steps."""
        world = self.world
        steps = self.steps[:num_steps]
        self._deal(self.steps)
        now = begun = 0.0
        busy: dict[str, float] = {}
        waits: list[float] = []
        ends: list[float] = []
        buffers: tuple[list[float], list[float]] = ([], [])
        skipped = len(steps) // 4
        dies = int(len(steps) * world.dead_at) if world.num_dead else len(steps)
        for number, step in enumerate(steps):
            if number == dies:
                busy = dict(self.busy)
                self._die(step[0], now)
            if number == skipped:
                self.busy, begun = dict.fromkeys(self.busy, 0.0), now
            self._issue(step[1], now)
            arrived = max(self.records[p].arrival for p in range(*step))
            start = max(now, arrived)
            node, server = self._buffered(step, start)
            buffers[0].append(node)
            buffers[1].append(server)
            waits.append(start - now)
            now = start + self._compute(step) + world.gradient_s
            ends.append(now)
            for position in range(*step):
                del self.records[position]
        busy = busy if dies < len(steps) else self.busy
        return self._outcome(waits, ends, begun, (skipped, dies), buffers, busy)

    def _outcome(
        self,
        waits: list[float],
        ends: list[float],
        begun: float,
        marks: tuple[int, int],
        buffers: tuple[list[float], ...],
        busy: dict[str, float],
    ) -> Outcome:
        skipped, dies = marks
        until = (ends[dies - 1] if dies < len(ends) else ends[-1]) - begun
        resources = {
            "capture": self.world.num_servers,
            "server link": self.world.num_servers,
            "node link": len(self.received_until),
        }
        after = sum(waits[dies:]) / (ends[-1] - ends[dies - 1]) if dies < len(ends) else 0.0
        return Outcome(
            wait_share=sum(waits[skipped:dies]) / until,
            step_s=until / max(dies - skipped, 1),
            node_buffer=max(buffers[0][skipped:]),
            server_buffer=max(buffers[1][skipped:]),
            use={name: busy[name] / until / count for name, count in resources.items()},
            wait_share_after=after,
        )

    def _deal(self, steps: list[tuple[int, int]]) -> None:
        for step in steps:
            shares = split_over_ranks(step, self.rows, self.lengths, self.world.num_ranks)
            self.rank_at.update({place: rank for rank, share in enumerate(shares) for place in share})

    def _compute(self, step: tuple[int, int]) -> float:
        loads = np.zeros(self.world.num_ranks)
        for position in range(*step):
            loads[self.rank_at[position]] += self.lengths[self.rows[position]]
        return float(loads.max()) / self.world.rank_rate

    def _issue(self, place: int, now: float) -> None:
        """Ask for every window that begins before `place`, the end of a step, or within the distance ahead of it."""
        tokens = 0.0
        end = place
        limit = self.world.ahead_tokens * self.world.step_tokens
        while end < len(self.rows) and tokens < limit:
            tokens += self.lengths[self.rows[end]]
            end += 1
        while self.issued < end:
            window = int(self.window_at[self.issued])
            stop = self.issued
            while stop < len(self.rows) and self.window_at[stop] == window:
                stop += 1
            self._capture(window, now)
            self.issued = stop

    def _capture(self, window: int, now: float) -> None:
        """Capture a window by its groups, and send each record as it is captured."""
        for rows in self.groups[window]:
            if self._owner is None:
                self._serve(window, rows, _named(window, self.alive), now)
            else:
                for row in rows:
                    self._serve(window, (row,), self._owner(self.place[row], self.rank_at[self.place[row]]), now)

    def _serve(self, window: int, rows: tuple[int, ...], server: int, now: float) -> None:
        world = self.world
        padded = len(rows) * max(int(self.lengths[row]) for row in rows)
        takes = padded / world.server_rate + world.record_s * len(rows)
        self.captured_until[server] = captured = max(self.captured_until[server], now) + takes
        self.busy["capture"] += takes
        for row in rows:
            position = self.place[row]
            num_bytes = float(sum(segment["length"] for segment in self.index.candidates(row)[0]))
            node = self.rank_at[position] // world.ranks_per_node
            out, into = num_bytes / world.server_link, num_bytes / world.node_link
            self.sent_until[server] = sent = max(self.sent_until[server], captured) + out
            self.received_until[node] = arrival = max(self.received_until[node], sent - into) + into
            self.busy["server link"] += out
            self.busy["node link"] += into
            self.records[position] = _Record(position, window, server, captured, arrival, num_bytes, node)

    def _die(self, place: int, now: float) -> None:
        """Servers die; what they had not delivered is captured again by others, group by group, once noticed."""
        dead = set(self.alive[: self.world.num_dead])
        self.alive = [server for server in self.alive if server not in dead]
        lost = sorted({r.window for r in self.records.values() if r.server in dead and r.arrival > now})
        for window in lost:
            delivered = {p: r for p, r in self.records.items() if r.window == window and r.arrival <= now}
            self._capture(window, now + self.world.notice_s)
            self.records.update(delivered)
        for position in [p for p in self.records if p < place]:  # of windows captured again, what was used before
            del self.records[position]

    def _buffered(self, step: tuple[int, int], now: float) -> tuple[float, float]:
        """Bytes that lie at the fullest node, the step's own included, and at the fullest server."""
        nodes, servers = np.zeros(len(self.received_until)), np.zeros(self.world.num_servers)
        for record in self.records.values():
            if record.arrival <= now:
                nodes[record.node] += record.num_bytes
            elif record.captured <= now:
                servers[record.server] += record.num_bytes
        return float(nodes.max()), float(servers.max())


def _named(window: int, servers: list[int]) -> int:
    """The living server whose hash with the window is largest: when one dies, only its windows move."""
    return max(servers, key=lambda server: hashlib.blake2b(f"{window}/{server}".encode(), digest_size=8).digest())


def _journal(lengths: Ints, bytes_per_token: float) -> npt.NDArray[np.void]:
    rows = np.zeros(len(lengths), JOURNAL_DTYPE)
    rows["row"], rows["generation"], rows["num_segments"] = np.arange(len(lengths)), 1, 1
    rows["length"] = (lengths * bytes_per_token).astype(np.int64)
    return rows
