"""States from one server or several, as a source like any other.

In: `grpc+tls://host:port` and secrets. Out: records and holes by position, exactly once and in order for whoever reads
positions once and in order; what is lost, cut or damaged on the way is asked for again. Nothing is opened before it is
needed, so a source may be made before a fork and pickled to another process.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from headrace.errors import StoreError, StreamError
from headrace.files import write_atomic
from headrace.kinds import StreamConfig
from headrace.record import Record, digest
from headrace.source import Hole, Position
from headrace.store.digested import load_digested
from headrace.store.manifest import Manifest
from headrace.stream.address import parse_source
from headrace.stream.link import Credentials, Link
from headrace.stream.reading import Counts, Reading
from headrace.stream.sight import Sight, reader_look
from headrace.stream.wire import Ticket, encode_commit, identity_digest

_FAREWELL_S = 2.0


class StreamSource:
    """Implements `headrace.source.Source` over servers that `headrace serve` runs."""

    def __init__(self, source: str, cfg: StreamConfig, reader: str = "trainer", log: Path | None = None) -> None:
        """Read the secrets; connect to nothing.

        Args: source: addresses as in the run file; reader: its name towards the servers; log: figures are added to
                it as JSON lines while records are read.
        Raises: ConfigError for another text, StreamError for secrets that cannot be read.
        """
        self._addresses = parse_source(source)
        self._cfg, self._reader = cfg, reader
        self._credentials = Credentials.read(cfg)
        self._links = [Link(address, self._credentials, cfg) for address in self._addresses]
        self._manifest: dict[str, Any] | None = None
        self._committed: Position | None = None
        self._counts = Counts()
        self._passes: set[Reading] = set()  # open ones
        self._began = time.monotonic()
        self.sight = Sight(self.figures, reader_look, log)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_links": None, "_passes": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._links = [Link(address, self._credentials, self._cfg) for address in self._addresses]

    def manifest(self) -> Mapping[str, Any]:
        """As every server has it; asked for once.

        Raises: StreamError when a server does not answer, refuses, or is of another version; StoreError naming the
        fields in which two servers differ.
        """
        if self._manifest is None:
            found = [link.action("manifest", _json) for link in self._links]
            first = Manifest.from_json(found[0], str(self._addresses[0]))
            for address, other in zip(self._addresses[1:], found[1:], strict=True):
                Manifest.from_json(other, str(address)).compare(first, str(self._addresses[0]))
            self._manifest = found[0]
        return self._manifest

    def records(self, positions: Iterable[Position]) -> Iterator[Record | Hole]:
        """Yield one item for each position, in order.

        Raises: StreamError at the position of a record that a server cannot give, when a server refuses, has other
        states than this source began with (naming the field), or has been silent for stream.give_up_s.
        """
        identity = identity_digest(self.manifest())

        def ticket(asked: Sequence[Position], max_bytes: int) -> Ticket:
            return Ticket(tuple(asked), max_bytes, identity, self._reader, self._committed, packed=True)

        sizes = (self._cfg.read_ahead_bytes, self._cfg.request_bytes)
        with closing(Reading(iter(positions), self._links, ticket, sizes, self._counts)) as reading:
            self._passes.add(reading)
            try:
                for item in reading:
                    yield item
                    self.sight.look_if_due()
            except StreamError:
                self._check_identity()
                raise
            finally:
                self._passes.discard(reading)

    def holes(self) -> Mapping[int, Hole]:
        """Holes that the servers have declared so far, by row."""
        told = [entry for link in self._links for entry in link.action("holes", _json)["holes"]]
        return {row: Hole(row, bytes.fromhex(id), reason) for row, id, reason in told}

    def commit(self, position: Position) -> None:
        """Say that nothing before `position` will be asked for again: told with the next request, and at the end."""
        self._committed = position

    def basis(self, path: Path) -> None:
        """Fetch the codec's basis into a file, unless it is there or the codec has none."""
        expected = self.manifest()["identity"]["codec"]["parameters"].get("basis")

        def checked(content: bytes) -> bytes:
            if digest(content).hex() != expected:
                raise StreamError(
                    f"a basis with digest {expected}", digest(content).hex(), "look at the server's folder"
                )
            return content

        if expected is not None and not path.is_file():
            write_atomic(path, self._links[0].action("basis", checked))

    def figures(self) -> dict[str, float]:
        """Counters of this side: records, wire_bytes, requests, waited_s, retries, seconds."""
        own: dict[str, float] = dict(vars(self._counts))
        retries = sum(link.num_retries for link in self._links)
        return {**own, "retries": retries, "seconds": time.monotonic() - self._began}

    def close(self) -> None:
        """Tell the servers what was committed last, once, and end every pass and call; safe to call twice."""
        for reading in list(self._passes):
            reading.close()
        if self._committed is not None:
            for link in self._links:
                link.tell("commit", encode_commit(self._reader, self._committed), _FAREWELL_S)
        for link in self._links:
            link.close()

    def _check_identity(self) -> None:
        """Name the field where a server has other states by now."""
        assert self._manifest is not None
        first = Manifest.from_json(self._manifest, "the first answer")
        for link in self._links:
            try:
                found = link.action("manifest", _json)
            except StreamError:
                continue  # it is this error's turn, not that one's
            Manifest.from_json(found, str(link.address)).compare(first, "those that this run began with")


def _json(content: bytes) -> dict[str, Any]:
    try:
        return load_digested(content, "an answer")
    except StoreError as exc:
        raise StreamError("an answer with its digest", "a damaged one", "ask again") from exc
